"""Train a module in several precisions, each run in a process of its own, and judge them. Read `_compare.py` first.

Reports and their parts import nothing of Lightning. The names that need Lightning are imported when they are used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from lightning_amp.compare._arm import Arm, ArmMetric
from lightning_amp.compare._process import HERE
from lightning_amp.compare._report import PrecisionReport
from lightning_amp.compare._run import CONTROL, Margin, Plan, Point, Run
from lightning_amp.compare._stats import Claim, Verdict

if TYPE_CHECKING:
    from lightning_amp.compare._checks import check_place, check_trainer_kwargs, check_trainer_names
    from lightning_amp.compare._compare import Comparison, compare_precisions
    from lightning_amp.compare._executors import run_in_process
    from lightning_amp.compare._local_devices import LocalDevices
    from lightning_amp.compare._observer import num_rows
    from lightning_amp.compare._progress import Progress, progress
    from lightning_amp.compare._spec import Spec, check_factory, parse_arms

__all__ = [
    "CONTROL",
    "HERE",
    "Arm",
    "ArmMetric",
    "Claim",
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
    "num_rows",
    "parse_arms",
    "progress",
    "run_in_process",
]

_NEED_LIGHTNING = {
    "_checks": ("check_place", "check_trainer_kwargs", "check_trainer_names"),
    "_compare": ("Comparison", "compare_precisions"),
    "_local_devices": ("LocalDevices",),
    "_observer": ("num_rows",),
    "_executors": ("run_in_process",),
    "_progress": ("Progress", "progress"),
    "_spec": ("Spec", "check_factory", "parse_arms"),
}
"""The names of each file that is imported only when one of them is used."""


def __getattr__(name: str) -> Any:
    for file, names in _NEED_LIGHTNING.items():
        if name in names:
            return getattr(_import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
