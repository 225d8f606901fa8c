"""Mixed precision for PyTorch Lightning that changes rounding, speed and memory, and nothing else."""

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
