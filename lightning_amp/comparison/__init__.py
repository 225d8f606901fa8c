"""Train whole runs side by side, each in a process of its own, as one would by hand."""

from lightning_amp.comparison._checks import check_trainer_names
from lightning_amp.comparison._compare import compare_precisions

__all__ = ["check_trainer_names", "compare_precisions"]
