"""The four callbacks, one file each. Read `_scale_monitor.py` first."""

from lightning_amp.callbacks._gradient_monitor import GradientMonitor
from lightning_amp.callbacks._metric_comparison import MetricComparison
from lightning_amp.callbacks._overflow_locator import OverflowLocator
from lightning_amp.callbacks._scale_monitor import ScaleMonitor

__all__ = ["GradientMonitor", "MetricComparison", "OverflowLocator", "ScaleMonitor"]
