"""Mixed precision for PyTorch Lightning that changes rounding, speed and memory, and nothing else."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_amp.callbacks import GradientMonitor, MetricComparison, OverflowLocator, ScaleMonitor
    from lightning_amp.precision import AmpPrecision, FSDPAmpPrecision
    from lightning_amp.scaling import DynamicLossScaler, StepRecord

__version__ = "0.1.0"

__all__ = [
    "AmpPrecision",
    "DynamicLossScaler",
    "FSDPAmpPrecision",
    "GradientMonitor",
    "MetricComparison",
    "OverflowLocator",
    "ScaleMonitor",
    "StepRecord",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a room, when it is asked for: Lightning takes seconds, which not everything needs."""
    if name in ("AmpPrecision", "FSDPAmpPrecision"):
        from lightning_amp import precision as room
    elif name in ("DynamicLossScaler", "StepRecord"):
        from lightning_amp import scaling as room
    elif name in __all__:
        from lightning_amp import callbacks as room
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(room, name)


def __dir__() -> list[str]:
    return __all__
