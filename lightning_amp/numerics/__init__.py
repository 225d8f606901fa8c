"""Numbers in low precision: the limits of formats, how well values fit, and whether they are finite. Plain torch.

Read `_limits.py` first.
"""

from lightning_amp.numerics._fidelity import fidelity, fidelity_sums, inner_product, output_sums
from lightning_amp.numerics._finite import (
    all_finite,
    extremes,
    names_of_nonfinite,
    nonfinite,
    nonfinite_flag,
    nonfinite_gradients,
    stack_scalars,
)
from lightning_amp.numerics._limits import FP16_LARGEST, HALF_DTYPES, fitting_scale, widest_dtype
from lightning_amp.numerics._ranges import dense, headroom_bits, largest, underflow_counts

__all__ = [
    "FP16_LARGEST",
    "HALF_DTYPES",
    "all_finite",
    "dense",
    "extremes",
    "fidelity",
    "fidelity_sums",
    "fitting_scale",
    "headroom_bits",
    "inner_product",
    "largest",
    "names_of_nonfinite",
    "nonfinite",
    "nonfinite_flag",
    "nonfinite_gradients",
    "output_sums",
    "stack_scalars",
    "underflow_counts",
    "widest_dtype",
]
