"""Find out why a step was skipped, or a gradient or a metric is wrong, by running the user's step again with remedies.

Read `_overflow.py` first.
"""

from lightning_amp.causes._lost_precision import lost_in_evaluation, lost_in_training
from lightning_amp.causes._nonfinite import nonfinite_names
from lightning_amp.causes._overflow import explain, origins, weight_growth, weight_sizes

__all__ = [
    "explain",
    "lost_in_evaluation",
    "lost_in_training",
    "nonfinite_names",
    "origins",
    "weight_growth",
    "weight_sizes",
]
