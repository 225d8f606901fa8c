"""Lightning callbacks: one file, one callback."""

from lightning_amp.callbacks._metric_comparison import MetricComparison
from lightning_amp.callbacks._scale_monitor import ScaleMonitor

__all__ = ["MetricComparison", "ScaleMonitor"]
