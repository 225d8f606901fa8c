"""What can this machine do, and why is a module not faster in mixed precision? Read `_doctor.py` first.

It examines the machine (`_examine_machine.py`) and a few training steps (`_examine_step.py`), and writes a record
(`_record.py`). Each file in `findings` reads that record, and `DoctorReport` holds the findings. The record, the
findings and the report import nothing of Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_amp.advice._decision import Decision
from lightning_amp.advice._machine import Machine
from lightning_amp.advice._page import SIGNS, details, title
from lightning_amp.advice._record import Step
from lightning_amp.advice._report import DoctorReport
from lightning_amp.advice.findings import Finding, summary

if TYPE_CHECKING:
    from lightning_amp.advice._doctor import doctor

__all__ = [
    "SIGNS",
    "Decision",
    "DoctorReport",
    "Finding",
    "Machine",
    "Step",
    "details",
    "doctor",
    "summary",
    "title",
]


def __getattr__(name: str) -> Any:
    """Import `doctor`, and Lightning with it, at its first use."""
    if name != "doctor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}._doctor").doctor
