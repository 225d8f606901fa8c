"""Train a module in several precisions, each run in a process of its own, and judge them. Read `_compare.py` first."""

from lightning_amp.compare._arm import Arm, ArmMetric
from lightning_amp.compare._checks import check_place, check_trainer_kwargs, check_trainer_names
from lightning_amp.compare._compare import Comparison, Progress, compare_precisions
from lightning_amp.compare._local_devices import LocalDevices
from lightning_amp.compare._observer import num_rows
from lightning_amp.compare._process import HERE, run_in_process
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import CONTROL, Margin, Plan, Point, Run
from lightning_amp.compare._spec import Spec, check_factory, make_arm, parse_arms
from lightning_amp.compare._stats import Verdict

__all__ = [
    "CONTROL",
    "HERE",
    "Arm",
    "ArmMetric",
    "Comparison",
    "LocalDevices",
    "Margin",
    "Plan",
    "Point",
    "PrecisionReport",
    "Progress",
    "Run",
    "Spec",
    "Verdict",
    "check_factory",
    "check_place",
    "check_trainer_kwargs",
    "check_trainer_names",
    "compare_precisions",
    "make_arm",
    "num_rows",
    "parse_arms",
    "run_in_process",
]
