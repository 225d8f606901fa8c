"""Find the settings that fit a module and a machine."""

from lightning_amp.tuning._fp32_modules import find_fp32_modules

__all__ = ["find_fp32_modules"]
