"""Which arm, why, and what would change it. The sentences are whole here, because most people read only them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

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


# -- use it ------------------------------------------------------------------------------------------------------------


def test_faster_and_not_worse() -> None:
    assert said(compared({"fp32": SAME, "bf16": BIT_WORSE}, step_s=FAST)) == (
        "bf16",
        "Use `bf16`: it is 2.00x as fast as `fp32` (2.00 to 2.00) and is not worse in `val_loss` within the margin. A"
        " margin below about 0.0369 in `val_loss` would change that.",
    )


def test_faster_and_smaller() -> None:
    label, sentence = said(compared({"fp32": SAME, "bf16": SAME}, step_s=FAST, memory=SMALL))
    assert label == "bf16"
    assert sentence == (
        "Use `bf16`: it is 2.00x as fast as `fp32` (2.00 to 2.00), needs 40 % less memory and is not worse in"
        " `val_loss` within the margin. Other data or longer training could change that."
    )


def test_faster_at_the_price_of_memory() -> None:
    sentence = compared({"fp32": SAME, "bf16": SAME}, step_s=FAST, memory={"fp32": 10, "bf16": 13}).recommendation
    assert "it is 2.00x as fast as `fp32` (2.00 to 2.00), needs 30 % more memory and is not worse" in sentence


def test_smaller_and_as_fast() -> None:
    label, sentence = said(compared({"fp32": SAME, "bf16": SAME}, memory=SMALL))
    assert label == "bf16"
    assert sentence.startswith(
        "Use `bf16`: it needs 40 % less memory than `fp32`, is as fast within 5 % and is not worse in `val_loss`"
    )


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        (None, "its speed was not measured"),
        ((0.8, 1.3, 1.6), "its speed is undecided (0.35x to 2.04x)"),
    ],
)
def test_smaller_at_an_unknown_speed_is_no_recommendation(factors: tuple[float, ...] | None, says: str) -> None:
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
        f"No recommendation yet: `bf16` is not worse and needs 40 % less memory, but {says}. More seeds narrow the"
        " interval of a speed.",
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


def test_an_arm_that_is_better_than_the_reference() -> None:
    label, sentence = said(compared({"fp32": WORSE, "bf16": SAME}, step_s=FAST))
    assert label == "bf16"
    assert sentence.endswith("Other data or longer training could change that.")


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


# -- not yet -----------------------------------------------------------------------------------------------------------


def test_too_few_seeds() -> None:
    assert said(compared({"fp32": [1.0], "bf16": [1.0]}, step_s=FAST)) == (
        None,
        "No recommendation yet: `bf16` is undecided in `val_loss`. It takes at least three seeds to decide."
        " Measured speed of `bf16`: 2.0x as fast, one run of each.",
    )


def test_as_many_seeds_as_the_verdicts_say() -> None:
    report = compared({"fp32": SAME, "bf16": UNCLEAR, "fp16": [0.9, 1.2, 1.4]})
    label, sentence = said(report)
    assert label is None
    assert sentence.startswith("No recommendation yet: `bf16` is undecided in `val_loss`; `fp16` is undecided in")
    numbers = [report.verdict(arm, "val_loss").seeds_needed or 0 for arm in ("bf16", "fp16")]
    assert numbers[0] > numbers[1] > 3
    assert f". It takes about {numbers[0]} seeds to decide, or larger margins." in sentence


def test_a_margin_of_nothing() -> None:
    sentence = compared({"fp32": SAME, "bf16": UNCLEAR}, margin=0.0).recommendation
    assert "It takes more seeds to decide, or larger margins." in sentence


def test_an_arm_that_failed_sometimes() -> None:
    label, sentence = said(compared({"fp32": [*SAME, 1.0], "bf16": [None, 1.1, None, 1.0]}))
    assert label is None
    assert sentence == "No recommendation yet: `bf16` failed with seeds 0 and 2. Failed runs have to run again." + (
        " Measured speed of `bf16`: as fast within 5 %."
    )


def test_an_arm_that_failed_where_the_reference_did() -> None:
    """Its verdict is about the seeds that both finished, but it is not recommended."""
    report = compared({"fp32": [None, *SAME], "bf16": [None, *SAME]}, step_s=FAST)
    assert report.verdict("bf16", "val_loss").claim == "not worse"
    assert report.recommended is None
    assert "`bf16` failed with seed 0." in report.recommendation


def test_an_arm_that_is_not_finite_sometimes() -> None:
    label, sentence = said(compared({"fp32": SAME, "bf16": [1.0, math.nan, 1.2]}))
    assert label is None
    assert sentence.startswith(
        "No recommendation yet: `bf16` is not finite in `val_loss`. `OverflowLocator` shows where."
    )


def test_a_metric_that_an_arm_never_logged() -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1, "val_acc": 0.1})
    runs = [make_run("fp32", s, 0.02, curves={"val_loss": curve(1.0), "val_acc": curve(0.9)}) for s in range(3)]
    runs += [make_run("bf16", s, 0.01, curves={"val_loss": curve(1.0)}) for s in range(3)]
    assert said(PrecisionReport(plan, runs))[0] is None


# -- stay --------------------------------------------------------------------------------------------------------------


def test_nothing_gained() -> None:
    assert said(compared({"fp32": SAME, "bf16": SAME})) == (
        "fp32",
        "Stay with `fp32`: `bf16` is not worse, but neither faster nor smaller. A larger model, or a device that"
        " computes in half precision, could change that.",
    )


def test_slower() -> None:
    label, sentence = said(compared({"fp32": SAME, "bf16": SAME}, step_s=SLOW))
    assert label == "fp32"
    assert sentence.startswith(
        "Stay with `fp32`: `bf16` is not worse, but 1.50x as slow (1.50 to 1.50). A larger model"
    )
    label, sentence = said(compared({"fp32": SAME, "bf16": SAME}, step_s=SLOW, memory=SMALL))
    assert label == "fp32"
    assert "`bf16` is not worse, but 1.50x as slow (1.50 to 1.50), though it needs 40 % less memory." in sentence


def test_worse() -> None:
    assert said(compared({"fp32": SAME, "bf16": WORSE, "fp16": [math.nan] * 3}, step_s=FAST)) == (
        "fp32",
        "Stay with `fp32`: `bf16` is worse in `val_loss`; `fp16` is worse in `val_loss`. Larger margins could change"
        " that, or an arm with `fp32_modules`.",
    )


def test_failed() -> None:
    assert said(compared({"fp32": SAME, "bf16": [None] * 3})) == (
        "fp32",
        "Stay with `fp32`: `bf16` failed (`OutOfMemoryError: CUDA out of memory.`). Failed runs have to run again before"
        " they can be judged.",
    )


def test_an_error_of_many_lines_is_cut() -> None:
    error = "RuntimeError: <img src=x>\n  `one`" + " and more" * 100
    runs = [*(make_run("fp32", s, curves={"val_loss": curve(1.0)}) for s in range(3)), failed("bf16", 0, error)]
    sentence = PrecisionReport(make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1}), runs).recommendation
    assert "`bf16` failed (`RuntimeError: <img src=x> 'one' and more and" in sentence
    assert len(sentence) < 300


# -- nothing can be said -----------------------------------------------------------------------------------------------


def test_no_margins() -> None:
    assert said(compared({"fp32": [1.0], "bf16": [1.0]}, None, step_s=FAST)) == (
        None,
        "No recommendation: no margin says what a precision may cost. Pass `margins`, for example"
        " `margins={'val_loss': 0.01}`, and at least three seeds. Measured speed of `bf16`: 2.0x as"
        " fast, one run of each.",
    )
    assert "three seeds" not in compared({"fp32": SAME, "bf16": SAME}, None).recommendation


def test_no_margins_and_no_directions() -> None:
    sentence = compared({"fp32": SAME, "bf16": SAME}, None, name="thing").recommendation
    assert "for example `margins={'thing': ('min', 0.01)}`." in sentence


@pytest.mark.parametrize("control", [False, True])
def test_nothing_to_compare_with(control: bool) -> None:
    label, sentence = said(compared({"fp32": SAME, **({CONTROL: SAME} if control else {})}))
    assert (label, sentence) == (
        None,
        "No recommendation: `fp32` is the only arm. Add a precision to compare it with.",
    )


def test_the_reference_failed() -> None:
    assert said(compared({"fp32": [None] * 3, "bf16": SAME}, step_s=FAST)) == (
        None,
        "No recommendation: the reference, `fp32`, failed (`OutOfMemoryError: CUDA out of memory.`).",
    )
    report = compared({"fp32": [1.0, math.nan, 1.2], "bf16": SAME}, step_s=FAST)
    assert said(report) == (None, "No recommendation: `val_loss` of the reference, `fp32`, is not finite.")


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


# -- all of them -------------------------------------------------------------------------------------------------------


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
