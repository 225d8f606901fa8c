"""Measure how long something takes and how much memory it needs. Read `_speed.py` first.

`DeviceClock` is the one clock. `StepTimer` times the steps of a fit, `in_rounds` times several runs in turns, and
`SpeedComparison` decides whether one of them is faster.
"""

from lightning_amp.measure._matmul_flops import MatmulFlops, flop_formulas, multiplied_dtype
from lightning_amp.measure._memory import MemoryOf, PeakMemory, is_settled, num_bytes
from lightning_amp.measure._speed import SAME_WITHIN, SpeedComparison, in_rounds, paired_log_ratio, times_as_fast
from lightning_amp.measure._step_timer import DeviceClock, StepTimer

__all__ = [
    "SAME_WITHIN",
    "DeviceClock",
    "MatmulFlops",
    "MemoryOf",
    "PeakMemory",
    "SpeedComparison",
    "StepTimer",
    "flop_formulas",
    "in_rounds",
    "is_settled",
    "multiplied_dtype",
    "num_bytes",
    "paired_log_ratio",
    "times_as_fast",
]
