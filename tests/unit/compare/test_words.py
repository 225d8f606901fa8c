"""Which arm, why, and what would change it. The whole sentences are in `approved/recommendations.txt`."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from support.approved import assert_approved
from support.reports import REPORTS, make_report
from support.synthetic import compared, curve, make_plan, make_run

from lightning_amp.compare import CONTROL, PrecisionReport, Run

SAME = [1.0, 1.1, 1.2]
BIT_WORSE = [1.02, 1.13, 1.21]
WORSE = [3.0, 3.2, 3.1]
UNCLEAR = [0.8, 1.3, 1.4]
FAST = {"fp32": 0.02, "bf16": 0.01}
SLOW = {"fp32": 0.02, "bf16": 0.03}
SMALL = {"fp32": 1000, "bf16": 600}
RECOMMENDATIONS = {
    "faster": ({"fp32": SAME, "bf16": BIT_WORSE}, {"step_s": FAST}),
    "less memory": ({"fp32": SAME, "bf16": BIT_WORSE}, {"memory": SMALL}),
    "better, faster, more memory": (
        {"fp32": WORSE, "bf16": SAME}, {"step_s": FAST, "memory": {"fp32": 10, "bf16": 13}}
    ),
    "one seed": ({"fp32": [1.0], "bf16": [1.0]}, {"step_s": FAST}),
    "undecided": ({"fp32": SAME, "bf16": UNCLEAR}, {}),
    "undecided, margin of 0": ({"fp32": SAME, "bf16": UNCLEAR}, {"margin": 0.0}),
    "runs failed": ({"fp32": [*SAME, 1.0], "bf16": [None, 1.1, None, 1.0]}, {}),
    "a run of the reference failed": ({"fp32": [*SAME, None], "bf16": [*SAME, 1.0]}, {}),
    "not finite with one seed": ({"fp32": SAME, "bf16": [1.0, math.nan, 1.2]}, {}),
    "no gain": ({"fp32": SAME, "bf16": BIT_WORSE}, {}),
    "slower, less memory": ({"fp32": SAME, "bf16": BIT_WORSE}, {"step_s": SLOW, "memory": SMALL}),
    "worse": ({"fp32": SAME, "bf16": WORSE, "fp16": [math.nan] * 3}, {"step_s": FAST}),
    "failed": ({"fp32": SAME, "bf16": [None] * 3}, {}),
    "no margin": ({"fp32": [1.0], "bf16": [1.0]}, {"margin": None, "step_s": FAST}),
    "one arm": ({"fp32": SAME, CONTROL: SAME}, {}),
    "the reference failed": ({"fp32": [None] * 3, "bf16": SAME}, {"step_s": FAST}),
    "the reference is not finite with one seed": ({"fp32": [1.0, math.nan, 1.2], "bf16": SAME}, {}),
}  # fmt: skip


def test_the_whole_recommendation() -> None:
    reports = {case: compared(finals, **settings) for case, (finals, settings) in RECOMMENDATIONS.items()}
    assert_approved("recommendations", {case: report.recommendation for case, report in reports.items()})
    for report in reports.values():
        label = {"Use": "bf16", "Stay": None if " for now" in report.recommendation else "fp32", "No": None}
        assert report.recommended == label[report.recommendation.split(maxsplit=1)[0]]


def with_times(report: PrecisionReport, factors: dict[str, tuple[float, ...]]) -> PrecisionReport:
    """Return a report in which the steps of an arm's seeds took so many times as long."""
    factor = {label: factors.get(label, (1.0,) * 3) for label in report.arms}
    return PrecisionReport(
        report.plan,
        [replace(r, step_s=tuple(s * factor[r.label][r.seed] for s in r.step_s)) for r in runs_of(report)],
    )


def runs_of(report: PrecisionReport) -> list[Run]:
    return [run for arm in report.arms.values() for run in arm.runs]


def test_an_undecided_speed_is_no_reason() -> None:
    """The arm may be several times as slow, and memory alone does not decide."""
    report = with_times(compared({"fp32": SAME, "bf16": BIT_WORSE}, memory=SMALL), {"bf16": (0.9, 1.2, 1.3)})
    assert "`bf16` is not worse and needs 40 % less memory, but its speed is undecided (0." in report.recommendation
    assert re.search(r"x\): run about \d+ seeds\.$", report.recommendation)


def test_an_arm_of_unknown_speed_is_named_beside_the_recommended_one() -> None:
    report = compared({"fp32": SAME, "bf16": BIT_WORSE, "fp16": BIT_WORSE}, step_s={"bf16": 0.008})
    report = with_times(report, {"fp16": (0.5, 1.5, 1.0)})
    assert report.recommended == "bf16"
    assert report.recommendation.endswith("would change that; `fp16` may be better, but this is not decided yet.")


@pytest.mark.parametrize("memory", [{"fp32": 1000, "bf16": 960}, {"fp32": 1000, "bf16": 1200}, {}])
def test_memory_that_hardly_differs_or_grows_is_no_reason(memory: dict[str, int]) -> None:
    assert compared({"fp32": SAME, "bf16": BIT_WORSE}, memory=memory).recommended == "fp32"


# -- the text ----------------------------------------------------------------------------------------------------------


def cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


@pytest.mark.parametrize("kind", [kind for kind in REPORTS if kind != "many"])
def test_markdown_holds_together_whatever_the_names(kind: str) -> None:
    report = REPORTS[kind]()
    text = str(report)
    table = cells(text)
    assert {len(row) for row in table} == {1 + len(report.arms)}
    assert "(reference)" in table[0][1]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]|(?<!\\)<script(?![^`]*`)", text)
    assert all("\n" not in line for line in text.split("\n"))


def test_the_table_and_the_notes() -> None:
    text = str(make_report(3, 3))
    rows = {row[0]: row[1:] for row in cells(text)}
    assert re.fullmatch(r"[+-]0\.\d+ \([+-]0\.\d+ to [+-]0\.\d+\)", rows["val_loss: difference"][1])
    assert rows["steps skipped"][:2] == ["0", "0"]
    assert rows["products in"][1] == "98 % bfloat16, 2 % float32"
    assert rows["loss scale"][0] == "-"
    assert "- `bf16`, `val_acc`: not worse: mean cost" in text
    assert "3 arms, seeds 0 to 2, `make_classifier` on `make_images`." in text
    assert "its 90 % interval over the seeds" in text
    assert "The machine was busy" not in text


def test_failed_runs_are_listed() -> None:
    assert "- failed: `bf16, seed 1`: OutOfMemoryError: CUDA" in str(REPORTS["failing"]())


@pytest.mark.parametrize(("values", "verdict"), [(WORSE, "worse"), (UNCLEAR, "undecided")])
def test_an_arm_that_is_not_fine_says_what_it_skipped(values: list[float], verdict: str) -> None:
    report = compared({"fp32": SAME, "bf16": values})
    runs = [replace(r, num_skipped=5, num_steps=95) if r.label == "bf16" else r for r in runs_of(report)]
    assert f"{verdict} in `val_loss`, and skipped 15 of 300 steps" in PrecisionReport(report.plan, runs).recommendation


@pytest.mark.parametrize(
    ("slow", "interval", "is_slower"), [([1.0, 1.3, 2.1], "0.47x to 3.29x", True), ([0.7, 1.0, 1.5], "0.", False)]
)
def test_a_busy_machine_decides_no_speed(slow: list[float], interval: str, is_slower: bool) -> None:
    """The seeds of the control disagree; its mean is 1.4 times as slow, or as fast as the reference."""
    finals = {"fp32": SAME, "bf16": SAME, CONTROL: SAME}
    report = compared(finals, 1.0, step_s={"bf16": 0.008, CONTROL: 0.01})
    all_runs = [(r, slow[r.seed] if r.label == CONTROL else 1.0) for r in runs_of(report)]
    report = PrecisionReport(report.plan, [replace(r, step_s=[s * by for s in r.step_s]) for r, by in all_runs])
    why = "the control, which computes the same as the reference, was 1.4x as slow"
    assert f"its speed is undecided ({interval}" in report.recommendation
    assert (f"{why}; run again on a quiet machine" in report.recommendation) == is_slower
    assert (f"The machine was busy: {why}. So every interval of a speed is wider" in str(report)) == is_slower


def test_a_run_without_validation() -> None:
    plan = make_plan(["fp32", "bf16"], 1)
    text = str(PrecisionReport(plan, [make_run("fp32", loss=curve(1.0)), make_run("bf16", loss=curve(1.0))]))
    assert text.startswith("No recommendation: the reference, `fp32`, logged no metric in validation")
