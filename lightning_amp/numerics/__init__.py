"""Numbers in low precision: what formats hold, how well values fit, whether they are finite. Plain torch."""

from lightning_amp.numerics._fidelity import cosine, fidelity, fidelity_sums, inner_product, sqnr_db
from lightning_amp.numerics._finite import (
    all_finite,
    count_nonfinite,
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
    "fidelity",
    "fidelity_sums",
    "fitting_scale",
    "headroom_bits",
    "inner_product",
    "largest",
    "largest_finite",
    "limits",
    "nonfinite",
    "nonfinite_flag",
    "nonfinite_gradients",
    "overflow_fraction",
    "sqnr_db",
    "stack_scalars",
    "underflow",
    "underflow_counts",
    "widest_dtype",
]
