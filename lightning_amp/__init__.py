"""Mixed precision for PyTorch Lightning that changes rounding, speed and memory, and nothing else."""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

if _typing.TYPE_CHECKING:
    from lightning_amp.advice import doctor as doctor
    from lightning_amp.callbacks import GradientMonitor as GradientMonitor
    from lightning_amp.callbacks import MetricComparison as MetricComparison
    from lightning_amp.callbacks import OverflowLocator as OverflowLocator
    from lightning_amp.callbacks import ScaleMonitor as ScaleMonitor
    from lightning_amp.compare import LocalDevices as LocalDevices
    from lightning_amp.compare import PrecisionReport as PrecisionReport
    from lightning_amp.compare import compare_precisions as compare_precisions
    from lightning_amp.findings import StepRecord as StepRecord
    from lightning_amp.precision import AmpPrecision as AmpPrecision
    from lightning_amp.precision import FabricAmpPrecision as FabricAmpPrecision
    from lightning_amp.precision import FSDPAmpPrecision as FSDPAmpPrecision
    from lightning_amp.scaling import DynamicLossScaler as DynamicLossScaler
    from lightning_amp.tune import find_batch_size as find_batch_size
    from lightning_amp.tune import find_fp32_modules as find_fp32_modules

__version__ = "0.1.0"

_FOLDER_OF = {
    "AmpPrecision": "precision",
    "DynamicLossScaler": "scaling",
    "FSDPAmpPrecision": "precision",
    "FabricAmpPrecision": "precision",
    "GradientMonitor": "callbacks",
    "LocalDevices": "compare",
    "MetricComparison": "callbacks",
    "OverflowLocator": "callbacks",
    "PrecisionReport": "compare",
    "ScaleMonitor": "callbacks",
    "StepRecord": "findings",
    "compare_precisions": "compare",
    "doctor": "advice",
    "find_batch_size": "tune",
    "find_fp32_modules": "tune",
}
_ELSEWHERE = {"ScaledSteps": "scaling", "fp32_region": "precision", "scaled_grad": "precision"}
_PLAIN = ("scaling", "findings")  # they know nothing of Lightning
__all__ = ["__version__", *_FOLDER_OF]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _typing.Any:
    """Import a public name or a folder on first use, because importing Lightning takes seconds."""
    if _FOLDER_OF.get(name, "scaling") not in _PLAIN:
        from lightning_amp._compat._names import use

        use("lightning")
    value = globals()[name] = _load(name)
    return value


def _load(name: str) -> _typing.Any:
    """Import a public name or a folder over either of the two kinds of Lightning.

    Three names of folders are an `ImportError` that says where they are: Python's `from lightning_amp import name`
    drops the text of an `AttributeError`.
    """
    if name in _ELSEWHERE:
        raise ImportError(f"`{name}` has its own folder: write `from {__name__}.{_ELSEWHERE[name]} import {name}`.")
    path = f"{__name__}.{_FOLDER_OF.get(name, name)}"
    if _util.find_spec(path) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(path)
    return getattr(module, name) if name in _FOLDER_OF else module


def __dir__() -> list[str]:
    return sorted({*globals(), *_FOLDER_OF})
