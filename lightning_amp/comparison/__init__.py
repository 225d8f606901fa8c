"""Train whole runs, each in a process of its own, as one would by hand; side by side."""

from lightning_amp.comparison._arm_process import Task
from lightning_amp.comparison._checks import check_place, check_trainer_kwargs, check_trainer_names
from lightning_amp.comparison._compare import compare_precisions
from lightning_amp.comparison._factories import check_factory
from lightning_amp.comparison._observer import num_rows
from lightning_amp.comparison._process import run_in_process
from lightning_amp.comparison._progress import Progress, progress
from lightning_amp.comparison._specs import ArmSpec, parse_arms

__all__ = [
    "ArmSpec",
    "Progress",
    "Task",
    "check_factory",
    "check_place",
    "check_trainer_kwargs",
    "check_trainer_names",
    "compare_precisions",
    "num_rows",
    "parse_arms",
    "progress",
    "run_in_process",
]
