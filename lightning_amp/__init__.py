"""Mixed precision for PyTorch Lightning that changes rounding, speed and memory, and nothing else."""

from lightning_amp.callbacks import MetricComparison, ScaleMonitor
from lightning_amp.precision import AmpPrecision
from lightning_amp.scaling import DynamicLossScaler, StepRecord

__version__ = "0.1.0"

__all__ = ["AmpPrecision", "DynamicLossScaler", "MetricComparison", "ScaleMonitor", "StepRecord", "__version__"]
