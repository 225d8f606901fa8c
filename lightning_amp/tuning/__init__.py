"""Which settings fit this module and this machine: measured on the user's own module and data."""

from lightning_amp.tuning._find_batch_size import find_batch_size
from lightning_amp.tuning._fp32_errors import NothingHelps
from lightning_amp.tuning._fp32_modules import find_fp32_modules
from lightning_amp.tuning._fp32_rules import Fp32Rules
from lightning_amp.tuning._result import BatchSizeResult, BatchSizes, Measurement

__all__ = [
    "BatchSizeResult",
    "BatchSizes",
    "Fp32Rules",
    "Measurement",
    "NothingHelps",
    "find_batch_size",
    "find_fp32_modules",
]
