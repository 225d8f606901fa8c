"""Numbers in low precision: what formats hold, how well values fit, where a non-finite value arose. Plain torch."""

from lightning_amp.numerics._bundles import make_bundle
from lightning_amp.numerics._diagnosis import Diagnosis, diagnose, nonfinite_entries, nonfinite_gradients
from lightning_amp.numerics._fidelity import cosine, fidelity, fidelity_sums, sqnr_db
from lightning_amp.numerics._limits import FORMATS, FormatLimits, limits
from lightning_amp.numerics._ranges import (
    ExponentHistogram,
    Underflow,
    count_nonfinite,
    exponent_histogram,
    headroom_bits,
    largest,
    largest_finite,
    overflow_fraction,
    underflow,
    underflow_counts,
)
from lightning_amp.numerics._replay import Replay, pack_random_state, replay
from lightning_amp.numerics._trace import Place, Trace

__all__ = [
    "FORMATS",
    "Diagnosis",
    "ExponentHistogram",
    "FormatLimits",
    "Place",
    "Replay",
    "Trace",
    "Underflow",
    "cosine",
    "count_nonfinite",
    "diagnose",
    "exponent_histogram",
    "fidelity",
    "fidelity_sums",
    "headroom_bits",
    "largest",
    "largest_finite",
    "limits",
    "make_bundle",
    "nonfinite_entries",
    "nonfinite_gradients",
    "overflow_fraction",
    "pack_random_state",
    "replay",
    "sqnr_db",
    "underflow",
    "underflow_counts",
]
