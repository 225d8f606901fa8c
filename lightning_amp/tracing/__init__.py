"""Where a step went wrong: the first non-finite value of a forward and backward, and its replay. Plain torch."""

from lightning_amp.tracing._bundles import make_bundle
from lightning_amp.tracing._conditions import RandomState, fp32_switches, full_precision, paired_random, reduces_fp32
from lightning_amp.tracing._diagnosis import Diagnosis, diagnose, nonfinite_entries
from lightning_amp.tracing._places import Place, called_by_optimizer, running_place, user_place
from lightning_amp.tracing._replay import replay
from lightning_amp.tracing._trace import GradientPlace, Trace

__all__ = [
    "Diagnosis",
    "GradientPlace",
    "Place",
    "RandomState",
    "Trace",
    "called_by_optimizer",
    "diagnose",
    "fp32_switches",
    "full_precision",
    "make_bundle",
    "nonfinite_entries",
    "paired_random",
    "reduces_fp32",
    "replay",
    "running_place",
    "user_place",
]
