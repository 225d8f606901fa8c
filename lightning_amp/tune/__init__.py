"""Find settings by measurements on the user's own module and data: a batch size, and modules to keep in fp32.

Read `_find_batch_size.py` or `_find_fp32_modules.py` first.
"""

from lightning_amp.tune._batch_sizes import BatchSizeResult, BatchSizes, Measurement
from lightning_amp.tune._find_batch_size import find_batch_size
from lightning_amp.tune._find_fp32_modules import find_fp32_modules
from lightning_amp.tune._fp32_search import Fp32Rules, NothingHelps

__all__ = [
    "BatchSizeResult",
    "BatchSizes",
    "Fp32Rules",
    "Measurement",
    "NothingHelps",
    "find_batch_size",
    "find_fp32_modules",
]
