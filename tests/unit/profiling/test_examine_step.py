"""Planted projects: each reason is named, the cure takes it away, and healthy ones are left in peace.

`python -m tests.benchmarks.doctor_projects` runs the same with the times that `doctor` takes by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.planned_race import planned_race
from support.slow_projects import HEALTHY, SLOW

from lightning_amp import doctor
from lightning_amp.advice import AS_IT_IS, IN_FP32
from lightning_amp.profiling import _examine_step

pytestmark = pytest.mark.usefixtures("quick")

SEVERE = {"data-bound", "autocast-off", "float64", "large-logits", "emulated-precision"}
"""Codes whose cases are a warning, whatever the clock says."""


def codes(report: Any) -> dict[str, str]:
    return {finding.code: finding.severity for finding in report.findings}


@pytest.mark.parametrize("name", SLOW)
def test_a_planted_reason_is_named_and_its_cure_takes_it_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SLOW[name]
    if case.code == "model-too-small":  # which is about times
        monkeypatch.setattr(_examine_step, "race", planned_race(lambda data: {AS_IT_IS: 1.0, IN_FP32: 0.9}))
    report = doctor(**case.arguments())
    found = codes(report)
    assert case.code in found
    if case.code in SEVERE:
        assert found[case.code] in ("warning", "error")
    cured = doctor(**case.arguments(cured=True))
    if case.code == "data-bound":  # of what remains the machine has a part
        assert cured.step.parts["data"] < 0.7 * report.step.parts["data"]
    elif case.code == "large-logits":
        assert cured.step.memory.logits < report.step.memory.logits / 3
    else:
        assert case.code not in codes(cured)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_project_is_left_in_peace(name: str) -> None:
    report = doctor(**HEALTHY[name].arguments())
    assert [finding for finding in report.findings if finding.is_problem] == []
    assert "nothing-to-do" in [finding.code for finding in report.findings]
