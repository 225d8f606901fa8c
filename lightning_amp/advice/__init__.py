"""What can this machine do, and why is a module not faster in mixed precision? Read `_doctor.py` first.

It examines the machine (`_machine.py`) and some training steps (`_watch.py`, `_race.py`), and writes a record
(`_step.py`). Each function in `findings/` reads that record, and `DoctorReport` holds the findings. The record, the
findings and the report import nothing of Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_amp.advice._report import DoctorReport
from lightning_amp.advice.findings._finding import Finding

if TYPE_CHECKING:
    from lightning_amp.advice._doctor import doctor

__all__ = ["DoctorReport", "Finding", "doctor"]


def __getattr__(name: str) -> Any:
    """Import `doctor`, and Lightning with it, at its first use."""
    if name != "doctor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}._doctor").doctor
