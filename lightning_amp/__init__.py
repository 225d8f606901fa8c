"""Mixed precision for PyTorch Lightning that changes rounding, speed and memory, and nothing else."""

import importlib as _importlib
import typing as _typing

from lightning_amp.callbacks import GradientMonitor, MetricComparison, OverflowLocator, ScaleMonitor
from lightning_amp.precision import AmpPrecision, FSDPAmpPrecision
from lightning_amp.scaling import DynamicLossScaler, StepRecord

if _typing.TYPE_CHECKING:
    from lightning_amp.comparison import PrecisionReport, compare_precisions

__version__ = "0.1.0"

__all__ = [
    "AmpPrecision",
    "DynamicLossScaler",
    "FSDPAmpPrecision",
    "GradientMonitor",
    "MetricComparison",
    "OverflowLocator",
    "PrecisionReport",
    "ScaleMonitor",
    "StepRecord",
    "__version__",
    "compare_precisions",
]

_WHOLE_RUNS = {"PrecisionReport": "comparison", "compare_precisions": "comparison"}
"""Tools for whole runs, and the room of each: imported when they are asked for, since training needs none of them."""


def __getattr__(name: str) -> _typing.Any:
    if name not in _WHOLE_RUNS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(f"{__name__}.{_WHOLE_RUNS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHOLE_RUNS})
