"""Which arm, why, and what would change it. The sentences are whole here, because most people read only them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from support.reports import REPORTS
from support.synthetic import compared, curve, failed, make_plan, make_run

from lightning_amp.compare._plan import CONTROL, Margin
from lightning_amp.compare._report import PrecisionReport

SAME = [1.0, 1.1, 1.2]
BIT_WORSE = [1.02, 1.13, 1.21]
WORSE = [3.0, 3.2, 3.1]
UNCLEAR = [0.8, 1.3, 1.4]
FAST = {"fp32": 0.02, "bf16": 0.01}
SLOW = {"fp32": 0.02, "bf16": 0.03}
SMALL = {"fp32": 1000, "bf16": 600}


def said(report: PrecisionReport) -> tuple[str | None, str]:
    return report.recommended, report.recommendation


GAIN = "Other data or longer training could change that."
TABLE = [
    ({"fp32": SAME, "bf16": BIT_WORSE}, {"step_s": FAST},
     "Use `bf16`: it is 2.00x as fast as `fp32` (2.00 to 2.00) and is not worse in `val_loss` within the margin. A"
     " margin below about 0.0369 in `val_loss` would change that."),
    ({"fp32": SAME, "bf16": SAME}, {"step_s": FAST, "memory": SMALL},
     "Use `bf16`: it is 2.00x as fast as `fp32` (2.00 to 2.00), needs 40 % less memory and is not worse in"
     f" `val_loss` within the margin. {GAIN}"),
    ({"fp32": SAME, "bf16": SAME}, {"step_s": FAST, "memory": {"fp32": 10, "bf16": 13}},
     "Use `bf16`: it is 2.00x as fast as `fp32` (2.00 to 2.00), needs 30 % more memory and is not worse in"
     f" `val_loss` within the margin. {GAIN}"),
    ({"fp32": SAME, "bf16": SAME}, {"memory": SMALL},
     "Use `bf16`: it needs 40 % less memory than `fp32`, is as fast within 5 % and is not worse in `val_loss` within"
     f" the margin. {GAIN}"),
    ({"fp32": WORSE, "bf16": SAME}, {"step_s": FAST},
     "Use `bf16`: it is 2.00x as fast as `fp32` (2.00 to 2.00) and is not worse in `val_loss` within the margin."
     f" {GAIN}"),
    ({"fp32": [1.0], "bf16": [1.0]}, {"step_s": FAST},
     "No recommendation yet: `bf16` is undecided in `val_loss`. It takes at least three seeds to decide."
     " Measured speed of `bf16`: 2.0x as fast, one run of each."),
    ({"fp32": SAME, "bf16": UNCLEAR}, {"margin": 0.0},
     "No recommendation yet: `bf16` is undecided in `val_loss`. It takes more seeds to decide, or larger margins."
     " Measured speed of `bf16`: as fast within 5 %."),
    ({"fp32": [*SAME, 1.0], "bf16": [None, 1.1, None, 1.0]}, {},
     "No recommendation yet: `bf16` failed with seeds 0 and 2. Failed runs have to run again."
     " Measured speed of `bf16`: as fast within 5 %."),
    ({"fp32": SAME, "bf16": [1.0, math.nan, 1.2]}, {},
     "No recommendation yet: `bf16` is not finite in `val_loss`. `OverflowLocator` shows where."
     " Measured speed of `bf16`: as fast within 5 %."),
    ({"fp32": SAME, "bf16": SAME}, {},
     "Stay with `fp32`: `bf16` is not worse, but neither faster nor smaller. A larger model, or a device that"
     " computes in half precision, could change that."),
    ({"fp32": SAME, "bf16": SAME}, {"step_s": SLOW},
     "Stay with `fp32`: `bf16` is not worse, but 1.50x as slow (1.50 to 1.50). A larger model, or a device that"
     " computes in half precision, could change that."),
    ({"fp32": SAME, "bf16": SAME}, {"step_s": SLOW, "memory": SMALL},
     "Stay with `fp32`: `bf16` is not worse, but 1.50x as slow (1.50 to 1.50), though it needs 40 % less memory."
     " A larger model, or a device that computes in half precision, could change that."),
    ({"fp32": SAME, "bf16": WORSE, "fp16": [math.nan] * 3}, {"step_s": FAST},
     "Stay with `fp32`: `bf16` is worse in `val_loss`; `fp16` is worse in `val_loss`. Larger margins could change"
     " that, or an arm with `fp32_modules`."),
    ({"fp32": SAME, "bf16": [None] * 3}, {},
     "Stay with `fp32`: `bf16` failed (`OutOfMemoryError: CUDA out of memory.`). Failed runs have to run again"
     " before they can be judged."),
    ({"fp32": [1.0], "bf16": [1.0]}, {"margin": None, "step_s": FAST},
     "No recommendation: no margin says what a precision may cost. Pass `margins`, for example"
     " `margins={'val_loss': 0.01}`, and at least three seeds. Measured speed of `bf16`: 2.0x as fast, one run of"
     " each."),
    ({"fp32": SAME, "bf16": SAME}, {"margin": None, "name": "thing"},
     "No recommendation: no margin says what a precision may cost. Pass `margins`, for example"
     " `margins={'thing': ('min', 0.01)}`. Measured speed of `bf16`: as fast within 5 %."),
    ({"fp32": SAME}, {},
     "No recommendation: `fp32` is the only arm. Add a precision to compare it with."),
    ({"fp32": SAME, CONTROL: SAME}, {},
     "No recommendation: `fp32` is the only arm. Add a precision to compare it with."),
    ({"fp32": [None] * 3, "bf16": SAME}, {"step_s": FAST},
     "No recommendation: the reference, `fp32`, failed (`OutOfMemoryError: CUDA out of memory.`)."),
    ({"fp32": [1.0, math.nan, 1.2], "bf16": SAME}, {"step_s": FAST},
     "No recommendation: `val_loss` of the reference, `fp32`, is not finite."),
]  # fmt: skip


@pytest.mark.parametrize(("finals", "settings", "sentence"), TABLE)
def test_the_whole_recommendation(finals: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    label = {"Use": "bf16", "Stay": "fp32", "No": None}[sentence.split(maxsplit=1)[0]]
    assert said(compared(finals, **settings)) == (label, sentence)


@pytest.mark.parametrize(
    ("factors", "says", "advice"),
    [
        (
            None,
            "its speed was not compared: fewer than 10 steady steps",
            '`measure_speed="alone"` measures each arm in short runs, alone on one device.',
        ),
        ((0.8, 1.3, 1.6), "its speed is undecided (0.35x to 2.04x)", "More seeds narrow the interval of a speed."),
    ],
)
def test_smaller_at_an_unknown_speed_is_no_recommendation(
    factors: tuple[float, ...] | None, says: str, advice: str
) -> None:
    """The arm may be several times as slow, and memory alone does not decide."""
    report = compared({"fp32": SAME, "bf16": SAME}, memory=SMALL)
    runs = [
        replace(
            run,
            step_s=tuple(s * factors[run.seed] ** (arm.label == "bf16") for s in run.step_s) if factors else (),
        )
        for arm in report.arms.values()
        for run in arm.runs
    ]
    assert said(PrecisionReport(report.plan, runs)) == (
        None,
        f"No recommendation yet: `bf16` is not worse and needs 40 % less memory, but {says}. {advice}",
    )


@pytest.mark.parametrize("memory", [{"fp32": 1000, "bf16": 960}, {"fp32": 1000, "bf16": 1200}, {}])
def test_memory_that_hardly_differs_or_grows_is_no_reason(memory: dict[str, int]) -> None:
    assert said(compared({"fp32": SAME, "bf16": SAME}, memory=memory))[0] == "fp32"


def test_an_arm_of_unknown_speed_is_named_beside_the_recommended_one() -> None:
    report = compared({"fp32": SAME, "bf16": SAME, "fp16": SAME}, step_s={"bf16": 0.008})
    runs = [
        replace(run, step_s=tuple(s * (0.5, 1.5, 1.0)[run.seed] for s in run.step_s)) if run.label == "fp16" else run
        for arm in report.arms.values()
        for run in arm.runs
    ]
    label, sentence = said(PrecisionReport(report.plan, runs))
    assert label == "bf16"
    assert sentence.endswith("More seeds could change that: `fp16` may be faster, but is undecided.")


def test_the_fastest_and_of_two_as_fast_the_smaller() -> None:
    finals = {"fp32": SAME, "a": SAME, "b": SAME, "c": SAME}
    assert compared(finals, step_s={"fp32": 0.03, "a": 0.02, "b": 0.01, "c": 0.015}).recommended == "b"
    assert compared(finals, memory={"fp32": 10, "a": 8, "b": 5, "c": 7}).recommended == "b"
    assert compared(finals, step_s={"fp32": 0.03, "a": 0.02}, memory={"fp32": 10, "b": 1}).recommended == "b"


def test_several_metrics_have_several_margins() -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1, "val_acc": 0.1, "val_f1": 0.1, "val_auc": 0.1, "seen": 1.0})
    values = {
        "val_loss": (SAME, BIT_WORSE),
        "val_acc": (BIT_WORSE, SAME),
        "val_f1": (SAME, SAME),
        "val_auc": (SAME, SAME),
    }
    runs = [
        make_run(label, seed, FAST[label], curves={name: curve(pair[i][seed]) for name, pair in values.items()})
        for i, label in enumerate(plan.arms)
        for seed in range(3)
    ]
    assert PrecisionReport(plan, runs).recommendation == (
        "Use `bf16`: it is 2.00x as fast as `fp32` (2.00 to 2.00) and is not worse in `val_loss`, `val_acc`, `val_f1`"
        " and 1 more within the margins. Margins below about 0.0558 in `val_loss` or 0.0558 in `val_acc` would change"
        " that."
    )


def test_a_faster_arm_that_is_undecided_is_named() -> None:
    step_s = {"fp32": 0.03, "bf16": 0.02, "fp16": 0.01, "fp8": 0.008}
    label, sentence = said(compared({"fp32": SAME, "bf16": SAME, "fp16": UNCLEAR}, step_s=step_s))
    assert label == "bf16"
    assert sentence.endswith("More seeds could change that: `fp16` may be faster, but is undecided.")
    sentence = compared(
        {"fp32": SAME, "bf16": BIT_WORSE, "fp16": UNCLEAR, "fp8": UNCLEAR}, step_s=step_s
    ).recommendation
    assert sentence.endswith(
        "A margin below about 0.0508 in `val_loss` would change that; more seeds could, too: `fp16` and `fp8`"
        " may be faster, but are undecided."
    )


@pytest.mark.parametrize("other", [[1.0, 1.1, math.nan], [None, 1.1, 1.2], WORSE])
def test_more_seeds_do_not_help_what_breaks(other: list[float | None]) -> None:
    step_s = {"fp32": 0.03, "bf16": 0.02, "fp16": 0.01}
    label, sentence = said(compared({"fp32": SAME, "bf16": SAME, "fp16": other}, step_s=step_s))
    assert label == "bf16"
    assert "fp16" not in sentence


def test_as_many_seeds_as_the_verdicts_say() -> None:
    report = compared({"fp32": SAME, "bf16": UNCLEAR, "fp16": [0.9, 1.2, 1.4]})
    label, sentence = said(report)
    assert label is None
    assert sentence.startswith("No recommendation yet: `bf16` is undecided in `val_loss`; `fp16` is undecided in")
    numbers = [report.verdict(arm, "val_loss").seeds_needed or 0 for arm in ("bf16", "fp16")]
    assert numbers[0] > numbers[1] > 3
    assert f". It takes about {numbers[0]} seeds to decide, or larger margins." in sentence


def test_an_arm_that_failed_where_the_reference_did() -> None:
    """Its verdict is about the seeds that both finished, but it is not recommended."""
    report = compared({"fp32": [None, *SAME], "bf16": [None, *SAME]}, step_s=FAST)
    assert report.verdict("bf16", "val_loss").claim == "not worse"
    assert report.recommended is None
    assert "`bf16` failed with seed 0." in report.recommendation


def test_a_metric_that_an_arm_never_logged() -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1, "val_acc": 0.1})
    runs = [make_run("fp32", s, 0.02, curves={"val_loss": curve(1.0), "val_acc": curve(0.9)}) for s in range(3)]
    runs += [make_run("bf16", s, 0.01, curves={"val_loss": curve(1.0)}) for s in range(3)]
    assert said(PrecisionReport(plan, runs))[0] is None


def test_an_error_of_many_lines_is_cut() -> None:
    error = "RuntimeError: <img src=x>\n  `one`" + " and more" * 100
    runs = [*(make_run("fp32", s, curves={"val_loss": curve(1.0)}) for s in range(3)), failed("bf16", 0, error)]
    sentence = PrecisionReport(make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1}), runs).recommendation
    assert "`bf16` failed (`RuntimeError: <img src=x> 'one' and more and" in sentence
    assert len(sentence) < 300


def test_nothing_was_logged() -> None:
    plan = make_plan(["fp32", "bf16"], 1, {"val_loss": 0.1})
    assert said(PrecisionReport(plan, [make_run("fp32"), make_run("bf16")])) == (
        None,
        "No recommendation: the reference, `fp32`, logged no metric in validation, by which precisions could be"
        " compared.",
    )


def test_nothing_ran() -> None:
    report = PrecisionReport(make_plan(["fp32", "bf16"], 1, {"val_loss": Margin(0.1)}), [])
    assert said(report) == (None, "No recommendation: the reference, `fp32`, did not run.")


def test_the_control_is_never_recommended() -> None:
    """Here it is the fastest, the smallest, and the only arm that is not worse."""
    step_s, memory = {"fp32": 0.03, "bf16": 0.03, CONTROL: 0.01}, {"fp32": 10, "bf16": 10, CONTROL: 1}
    report = compared({"fp32": SAME, "bf16": WORSE, CONTROL: SAME}, step_s=step_s, memory=memory)
    assert report.arms[CONTROL].metrics["val_loss"].verdict.claim == "not worse"
    assert report.recommended == "fp32"
    assert CONTROL not in report.recommendation


def test_a_label_stays_on_its_line() -> None:
    label = "a `b`\n| <c>"
    report = compared({"fp32": SAME, label: SAME}, step_s={"fp32": 0.02, label: 0.01})
    assert report.recommended == label
    assert report.recommendation.startswith("Use `a 'b' | <c>`: it is 2.00x")


@pytest.mark.parametrize("kind", [kind for kind in REPORTS if kind != "many"])  # which takes seconds
def test_it_reads_well(kind: str) -> None:
    report = REPORTS[kind]()
    label, sentence = said(report)
    assert label is None or label in report.plan.arms
    assert label != CONTROL
    assert (label is None) == sentence.startswith("No recommendation")
    assert re.match(r"(Use|Stay with|No recommendation)\b", sentence)
    assert sentence.endswith(".")
    prose = re.sub(r"`[^`]*`", "x", sentence)
    assert prose.count("`") == 0
    assert not re.search(r"  |\.\.|\s[.,:;]|\bNone\b|\bnan\b|\(\)|[,;:]\.|\n", prose)
    assert len(re.findall(r"\.(?= |$)", prose)) <= 3
