"""Lightning callbacks: one file, one callback."""

from lightning_amp.callbacks._scale_monitor import ScaleMonitor

__all__ = ["ScaleMonitor"]
