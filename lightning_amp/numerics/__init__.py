"""Numbers in low precision: what formats hold, how well values fit, where a non-finite value arose. Plain torch."""

from lightning_amp.numerics._fidelity import cosine, fidelity, fidelity_sums, sqnr_db
from lightning_amp.numerics._limits import FORMATS, FormatLimits, limits
from lightning_amp.numerics._ranges import (
    ExponentHistogram,
    Underflow,
    count_nonfinite,
    dense,
    exponent_histogram,
    headroom_bits,
    largest,
    largest_finite,
    overflow_fraction,
    underflow,
    underflow_counts,
)

__all__ = [
    "FORMATS",
    "ExponentHistogram",
    "FormatLimits",
    "Underflow",
    "cosine",
    "count_nonfinite",
    "dense",
    "exponent_histogram",
    "fidelity",
    "fidelity_sums",
    "headroom_bits",
    "largest",
    "largest_finite",
    "limits",
    "overflow_fraction",
    "sqnr_db",
    "underflow",
    "underflow_counts",
]
