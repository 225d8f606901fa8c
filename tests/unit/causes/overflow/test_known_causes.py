"""Causes are told apart and counted, up to a limit."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_amp.causes.overflow import Explained, KnownCauses
from lightning_amp.findings import StepRecord
from lightning_amp.reports import OverflowReport, Remedy
from lightning_amp.scaling import Saved
from lightning_amp.tracing import Diagnosis


def report(index: int, **changes: Any) -> OverflowReport:
    arguments: dict[str, Any] = {
        "record": StepRecord(index, 0, 2.0**16, 2.0**15, skipped=True, reason="gradient", precision="fp16"),
        "rank": 0, "world_size": 1, "epoch": 0, "batch_idx": index, "window": (index, index), "num_replayed": 1,
        "cause": "backward", "diagnosis": Diagnosis("backward"), "parameters": (), "scale_is": "dynamic",
    }  # fmt: skip
    return OverflowReport(**{**arguments, **changes})


def restored(max_reports: int, state: dict[str, Any]) -> KnownCauses:
    causes = KnownCauses(max_reports)
    causes.restore(Saved(state, "OverflowLocator"), state)
    return causes


def settling(index: int) -> OverflowReport:
    return report(index, remedies=(Remedy("scale", (2.0**12,), True),))


def test_a_scale_that_settles_only_counts() -> None:
    causes = KnownCauses(1)
    for index in range(13):
        assert causes.add([Explained(settling(index), "scale")]) == []
    assert causes.reports == []
    assert not causes.is_complete
    assert causes.summary() == "13 steps skipped while the scale settled, which is how dynamic scaling works"
    assert causes.add([Explained(report(40), "log")])
    assert causes.is_complete


def test_a_static_scale_is_a_fault() -> None:
    causes = KnownCauses(1)
    record = StepRecord(0, 0, 64.0, 64.0, skipped=True, reason="gradient", precision="fp16")
    assert causes.add(
        [Explained(report(0, record=record, scale_is="static", remedies=(Remedy("scale", (8.0,), True),)), "scale")]
    )


def test_one_rank_may_know_a_cause_that_is_new_on_another() -> None:
    causes = KnownCauses(5)
    causes.add([Explained(report(0), "a")])
    taken = causes.add([Explained(report(1), "a"), Explained(report(1, rank=1), "b")])
    assert [(r.rank, r.is_repeated) for r in taken] == [(0, True), (1, False)]


def test_the_number_of_replays_is_limited() -> None:
    causes = KnownCauses(1)
    for index in range(20):
        assert not causes.is_complete
        causes.add([Explained(settling(index), "scale")])
    assert causes.is_complete
    assert not causes.has_all_causes


def test_state() -> None:
    causes = KnownCauses(3)
    assert causes.state() == {"num_located": 0, "reports": []}
    causes.add([Explained(report(0), "a")])
    causes.add([Explained(report(1), "a")])
    causes.add([Explained(settling(2), "scale")])
    again = restored(3, causes.state())
    assert again.state() == causes.state()
    assert again.reports == causes.reports
    assert again.summary() == causes.summary()


@pytest.mark.parametrize("looks", [[1, 2], [1, -1, 0, 0], "abcd", [1.5, 0, 0, 0]])
def test_a_damaged_state_is_refused(looks: Any) -> None:
    state = {"num_located": 0, "reports": [], "looks": looks}
    with pytest.raises(ValueError, match="looks"):
        restored(3, state)


def test_the_cause_of_the_last_skip_is_told_with_its_remedies() -> None:
    causes = KnownCauses(5)
    assert causes.since(0) == ""
    causes.add([Explained(report(3, remedies=(Remedy("bf16", (), True),), scale_is="static"), "a")])
    causes.add([Explained(report(4, scale_is="static"), "a")])
    assert "'bf16', whose range is that of fp32 (tried: works)" in causes.since(4)
    assert causes.since(5) == "", "the last skip was before this step"
    causes.add([Explained(settling(5), "scale")])
    assert causes.since(0) == "", "the last skip is no fault"
    causes.add([Explained(report(6, scale_is="static"), "b")])
    assert "(tried: works)" not in causes.since(0)


def test_remedies_tried_before_a_resume_are_not_known() -> None:
    causes = KnownCauses(5)
    causes.add([Explained(report(3, remedies=(Remedy("bf16", (), True),), scale_is="static"), "a")])
    again = restored(5, causes.state())
    again.add([Explained(report(4, scale_is="static"), "a")])
    assert again.since(0) == ""


def test_a_step_that_was_taken_is_no_skip() -> None:
    record = StepRecord(2, 0, 1.0, 1.0, skipped=False, reason="none", precision="bf16")
    causes = KnownCauses(5)
    assert len(causes.add([Explained(report(2, record=record, cause="loss"), "a")])) == 1
    assert causes.add([Explained(report(3, record=record, cause="loss"), "a")]) == []
    assert causes.summary() == causes.since(0) == ""
    causes.add([Explained(report(4, cause="loss"), "a")])
    assert causes.summary() == "1 step more skipped for a cause that was reported"
