"""Find the settings that fit a module and a machine."""

from lightning_amp.tuning._fp32_errors import NothingHelps
from lightning_amp.tuning._fp32_modules import find_fp32_modules
from lightning_amp.tuning._fp32_rules import Fp32Rules

__all__ = ["Fp32Rules", "NothingHelps", "find_fp32_modules"]
