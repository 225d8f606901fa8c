"""Run by `test_symptoms.py`: `examples/symptoms.py` where a step takes as long as it says here, whatever else runs.

All steps run, once; the seconds of a race and the rates of the machine are not measured. The doctor's words depend on
them, and they on what else the machine does.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from support.doctor_facts import machine

from lightning_amp.advice import AS_IT_IS, IN_FP32, LARGER_BATCH, Variant
from lightning_amp.profiling import _doctor, _examine_step

EXAMPLE = Path(__file__).parents[2] / "examples" / "symptoms.py"
STEP_MS = {
    "small": {AS_IT_IS: 1.0, IN_FP32: 0.8, LARGER_BATCH: 1.1},
    "large": {AS_IT_IS: 15.0, IN_FP32: 34.0, LARGER_BATCH: 40.0},
}
ROUNDS = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0)


def race(contestants: Sequence[Any], device: Any, kwargs: Any, data: Any) -> tuple[Variant, ...]:
    """Run each once, and return what is planned."""
    for contestant in contestants:
        contestant.round(device, kwargs, data, 1)
    found = [contestant.result() for contestant in contestants]
    assert [variant.error for variant in found if variant.error or len(variant.step_s) != 1] == []
    assert {AS_IT_IS, IN_FP32} <= {variant.label for variant in found}
    size = "large" if data.rows > 16 else "small"
    return tuple(
        Variant(label, tuple(share * STEP_MS[size][label] / 1e3 for share in (ROUNDS if i % 2 else ROUNDS[::-1])))
        for i, label in enumerate(v.label for v in found)
        if label in STEP_MS[size]
    )


if __name__ == "__main__":
    with (
        mock.patch.object(_doctor, "examine", return_value=machine()),
        mock.patch.object(_examine_step, "race", race),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
