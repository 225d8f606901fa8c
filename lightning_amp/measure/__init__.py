"""How long something takes and how much memory it needs, beside something else. Read `_speed.py` first."""

from lightning_amp.measure._device_clock import DeviceClock
from lightning_amp.measure._speed import SpeedClaim, SpeedComparison, paired_log_ratio, times_as_fast

__all__ = ["DeviceClock", "SpeedClaim", "SpeedComparison", "paired_log_ratio", "times_as_fast"]
