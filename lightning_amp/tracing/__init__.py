"""Find the first bad value of a forward and backward. Plain torch. Read `_trace.py` first."""

from lightning_amp.tracing._conditions import RandomState, fp32_switches, full_precision, paired_random, reduces_fp32
from lightning_amp.tracing._first_bad import (
    bad_entries,
    described,
    first_bad,
    first_difference,
    has_fault,
    is_received,
    maker_module,
    taking_modules,
)
from lightning_amp.tracing._fp32_throughout import Fp32Draws, fp32_throughout
from lightning_amp.tracing._operations import EXPONENTIALS, domain, plain
from lightning_amp.tracing._places import Place, running_place, user_place
from lightning_amp.tracing._trace import Call, Gradient, Trace

__all__ = [
    "EXPONENTIALS",
    "Call",
    "Fp32Draws",
    "Gradient",
    "Place",
    "RandomState",
    "Trace",
    "bad_entries",
    "described",
    "domain",
    "first_bad",
    "first_difference",
    "fp32_switches",
    "fp32_throughout",
    "full_precision",
    "has_fault",
    "is_received",
    "maker_module",
    "paired_random",
    "plain",
    "reduces_fp32",
    "running_place",
    "taking_modules",
    "user_place",
]
