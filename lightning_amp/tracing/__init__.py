"""Where a step went wrong: the first non-finite value of a forward and backward, and its replay. Plain torch."""

from lightning_amp.tracing._bundles import make_bundle
from lightning_amp.tracing._diagnosis import Diagnosis, diagnose, nonfinite_entries
from lightning_amp.tracing._replay import pack_random_state, replay
from lightning_amp.tracing._trace import Place, Trace

__all__ = [
    "Diagnosis",
    "Place",
    "Trace",
    "diagnose",
    "make_bundle",
    "nonfinite_entries",
    "pack_random_state",
    "replay",
]
