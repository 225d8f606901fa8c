"""Train a module in several precisions, each run in a process of its own, and judge them. Read `_compare.py` first.

Reports and their parts import nothing of Lightning. The names that need Lightning are imported when they are used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from lightning_amp.compare._arm import Arm, ArmMetric
from lightning_amp.compare._plan import CONTROL, Margin, Plan
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import ArmRun, Point
from lightning_amp.compare._verdict import Claim, Verdict

if TYPE_CHECKING:
    from lightning_amp.compare._arms import ArmSpec, parse_arms
    from lightning_amp.compare._checks import check_place, check_trainer_kwargs, check_trainer_names
    from lightning_amp.compare._compare import compare_precisions
    from lightning_amp.compare._comparison import Comparison
    from lightning_amp.compare._executors import check_executor, run_on
    from lightning_amp.compare._factories import check_factory, dumps_for
    from lightning_amp.compare._fork_server import FORK_SERVER
    from lightning_amp.compare._local_devices import LocalDevices
    from lightning_amp.compare._observer import num_rows
    from lightning_amp.compare._pack import run_in_process
    from lightning_amp.compare._progress import Progress, progress
    from lightning_amp.compare._short_training import StopWhenMeasured, short_trainer
    from lightning_amp.compare._worker import Task

__all__ = [
    "CONTROL",
    "FORK_SERVER",
    "Arm",
    "ArmMetric",
    "ArmRun",
    "ArmSpec",
    "Claim",
    "Comparison",
    "LocalDevices",
    "Margin",
    "Plan",
    "Point",
    "PrecisionReport",
    "Progress",
    "StopWhenMeasured",
    "Task",
    "Verdict",
    "check_executor",
    "check_factory",
    "check_place",
    "check_trainer_kwargs",
    "check_trainer_names",
    "compare_precisions",
    "dumps_for",
    "num_rows",
    "parse_arms",
    "progress",
    "run_in_process",
    "run_on",
    "short_trainer",
]

_NEED_LIGHTNING = {
    "FORK_SERVER": "_fork_server",
    "ArmSpec": "_arms",
    "Comparison": "_comparison",
    "LocalDevices": "_local_devices",
    "Progress": "_progress",
    "StopWhenMeasured": "_short_training",
    "Task": "_worker",
    "check_executor": "_executors",
    "check_factory": "_factories",
    "check_place": "_checks",
    "check_trainer_kwargs": "_checks",
    "check_trainer_names": "_checks",
    "compare_precisions": "_compare",
    "dumps_for": "_factories",
    "num_rows": "_observer",
    "parse_arms": "_arms",
    "progress": "_progress",
    "run_in_process": "_pack",
    "run_on": "_executors",
    "short_trainer": "_short_training",
}
"""The file of each name that is imported only when it is used."""


def __getattr__(name: str) -> Any:
    if name not in _NEED_LIGHTNING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"{__name__}.{_NEED_LIGHTNING[name]}"), name)
