"""Find settings by measurements on the user's own module and data: a batch size, and modules to keep in fp32.

Read `_find_batch_size.py` or `_find_fp32_modules.py` first. The results and the choice of what to try next
(`_batch_sizes.py`, `_fp32_search.py`) do not import Lightning.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from lightning_amp.tune._batch_sizes import BatchSizeResult, BatchSizes, Measurement
from lightning_amp.tune._fp32_rules import Fp32Rules, NothingHelps

if TYPE_CHECKING:
    from lightning_amp.tune._find_batch_size import find_batch_size
    from lightning_amp.tune._find_fp32_modules import find_fp32_modules

__all__ = [
    "BatchSizeResult",
    "BatchSizes",
    "Fp32Rules",
    "Measurement",
    "NothingHelps",
    "find_batch_size",
    "find_fp32_modules",
]

_NEED_LIGHTNING = ("find_batch_size", "find_fp32_modules")
"""Functions that are imported on first use, since they import Lightning."""


def __getattr__(name: str) -> Any:
    if name not in _NEED_LIGHTNING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"{__name__}._{name}"), name)
