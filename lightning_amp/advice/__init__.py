"""What can this machine do, and why is a module not faster in mixed precision? Read `_doctor.py` first.

It examines the machine (`_machine.py`) and some training steps (`_watch.py`, `_race.py`), and writes a record
(`_step.py`). Each function in `findings/` reads that record, and `DoctorReport` holds the findings.
"""

from lightning_amp.advice._doctor import doctor
from lightning_amp.advice._report import DoctorReport
from lightning_amp.advice.findings._finding import Finding

__all__ = ["DoctorReport", "Finding", "doctor"]
