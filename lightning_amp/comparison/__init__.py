"""Train whole runs side by side, each in a process of its own, as one would by hand."""

from lightning_amp.comparison._checks import check_trainer_kwargs
from lightning_amp.comparison._compare import compare_precisions
from lightning_amp.comparison._specs import ArmSpec, parse_arms

__all__ = ["ArmSpec", "check_trainer_kwargs", "compare_precisions", "parse_arms"]
