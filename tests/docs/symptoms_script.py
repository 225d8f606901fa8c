"""Run by `test_examples.py`: `examples/symptoms.py` where a step takes as long as it says here, whatever else runs.

The seconds of a race and the rates of the machine are planned: what the doctor says depends on them, and they depend on
what else the machine does.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from unittest import mock

from support.doctor_facts import machine
from support.planned_race import planned_race

from lightning_amp.advice import _doctor
from lightning_amp.advice._step import AS_IT_IS, IN_FP32
from lightning_amp.advice.findings import _products

EXAMPLE = Path(__file__).parents[2] / "examples" / "symptoms.py"
SMALL_MS = {AS_IT_IS: 1.0, IN_FP32: 0.8}
LARGE_MS = {AS_IT_IS: 15.0, IN_FP32: 34.0}

if __name__ == "__main__":
    race = planned_race(lambda data: LARGE_MS if data.rows > 16 else SMALL_MS)
    with (
        mock.patch.object(_doctor, "examine", return_value=machine()),
        mock.patch.object(_doctor, "race", race),
        mock.patch.object(_products, "slowest_product", return_value=""),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
