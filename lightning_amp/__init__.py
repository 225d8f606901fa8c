"""Mixed precision for PyTorch Lightning that changes rounding, speed and memory, and nothing else."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from lightning_amp.advice import doctor
    from lightning_amp.callbacks import GradientMonitor, MetricComparison, OverflowLocator, ScaleMonitor
    from lightning_amp.compare import LocalDevices, PrecisionReport, compare_precisions
    from lightning_amp.findings import StepRecord
    from lightning_amp.precision import AmpPrecision, FabricAmpPrecision, FSDPAmpPrecision
    from lightning_amp.scaling import DynamicLossScaler
    from lightning_amp.tune import find_batch_size, find_fp32_modules

__version__ = "0.1.0"

__all__ = [
    "AmpPrecision",
    "DynamicLossScaler",
    "FSDPAmpPrecision",
    "FabricAmpPrecision",
    "GradientMonitor",
    "LocalDevices",
    "MetricComparison",
    "OverflowLocator",
    "PrecisionReport",
    "ScaleMonitor",
    "StepRecord",
    "__version__",
    "compare_precisions",
    "doctor",
    "find_batch_size",
    "find_fp32_modules",
]

_PUBLIC = {
    "advice": ("doctor",),
    "callbacks": ("GradientMonitor", "MetricComparison", "OverflowLocator", "ScaleMonitor"),
    "compare": ("LocalDevices", "PrecisionReport", "compare_precisions"),
    "findings": ("StepRecord",),
    "precision": ("AmpPrecision", "FSDPAmpPrecision", "FabricAmpPrecision"),
    "scaling": ("DynamicLossScaler",),
    "tune": ("find_batch_size", "find_fp32_modules"),
}
_ROOM_OF = {name: room for room, names in _PUBLIC.items() for name in names}
_ROOMS = (
    "casting",
    "causes",
    "cli",
    "measure",
    "numerics",
    "reports",
    "shadow",
    "skipped_steps",
    "tracing",
    *_PUBLIC,
)


def __getattr__(name: str) -> _typing.Any:
    """Import a public name or a folder on first use, because importing Lightning takes seconds."""
    if name in _ROOMS:
        return _importlib.import_module(f"{__name__}.{name}")
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
