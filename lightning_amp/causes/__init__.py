"""Find out why a step was skipped, or a gradient or a metric is wrong, by running the user's step again with remedies.

Read `_lost_precision.py` first.
"""

from lightning_amp.causes._lost_precision import lost_in_evaluation, lost_in_training, nonfinite_names

__all__ = ["lost_in_evaluation", "lost_in_training", "nonfinite_names"]
