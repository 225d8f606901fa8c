"""Numbers in low precision: what formats hold, how well values fit, whether they are finite. Plain torch.

Read `_limits.py` first.
"""

from lightning_amp.numerics._fidelity import cosine, fidelity, fidelity_sums, inner_product, output_sums, sqnr_db
from lightning_amp.numerics._finite import (
    all_finite,
    count_nonfinite,
    extremes,
    is_finite,
    nonfinite,
    nonfinite_flag,
    nonfinite_gradients,
    stack_scalars,
)
from lightning_amp.numerics._limits import FORMATS, HALF_DTYPES, FormatLimits, fitting_scale, limits, widest_dtype
from lightning_amp.numerics._ranges import (
    ExponentHistogram,
    Underflow,
    dense,
    exponent_histogram,
    headroom_bits,
    largest,
    largest_finite,
    outside_modes,
    overflow_fraction,
    underflow,
    underflow_counts,
)
from lightning_amp.numerics._scaled_casts import ScaledCast

__all__ = [
    "FORMATS",
    "HALF_DTYPES",
    "ExponentHistogram",
    "FormatLimits",
    "ScaledCast",
    "Underflow",
    "all_finite",
    "cosine",
    "count_nonfinite",
    "dense",
    "exponent_histogram",
    "extremes",
    "fidelity",
    "fidelity_sums",
    "fitting_scale",
    "headroom_bits",
    "inner_product",
    "is_finite",
    "largest",
    "largest_finite",
    "limits",
    "nonfinite",
    "nonfinite_flag",
    "nonfinite_gradients",
    "output_sums",
    "outside_modes",
    "overflow_fraction",
    "sqnr_db",
    "stack_scalars",
    "underflow",
    "underflow_counts",
    "widest_dtype",
]
