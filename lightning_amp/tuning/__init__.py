"""Which settings fit this machine: measured on the user's own module and data."""

from lightning_amp.tuning._find_batch_size import find_batch_size
from lightning_amp.tuning._result import BatchSizeResult, BatchSizes, Measurement

__all__ = ["BatchSizeResult", "BatchSizes", "Measurement", "find_batch_size"]
