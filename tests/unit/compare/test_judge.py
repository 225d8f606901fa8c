"""From runs to arms: pairs, better directions, verdicts and speeds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from support.synthetic import compared, curve, failed, make_plan, make_run

from lightning_amp.compare._judge import direction, judge
from lightning_amp.compare._plan import CONTROL, Margin, Plan
from lightning_amp.compare._run import ArmRun

SAME = [1.0, 1.1, 1.2]


def runs_of(label: str, finals: dict[int, float], name: str = "val_loss", **fields: Any) -> list[ArmRun]:
    return [make_run(label, seed, curves={name: curve(value)}, **fields) for seed, value in finals.items()]


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_pairs_are_of_a_seed_and_not_of_a_position() -> None:
    plan = make_plan(["fp32", "bf16"], 4, {"val_loss": 0.05})
    theirs = {0: 10.0, 1: 20.0, 2: 30.0, 3: 40.0}
    runs = [*runs_of("fp32", theirs), *runs_of("bf16", {seed: value + 0.01 for seed, value in theirs.items()})]
    random.Random(1).shuffle(runs)
    metric = judge(plan, runs).arms["bf16"].metrics["val_loss"]
    assert metric.difference is not None
    assert metric.difference.values == pytest.approx([0.01] * 4)
    assert metric.verdict.claim == "not worse"


def test_a_seed_that_only_one_of_them_finished_is_no_pair() -> None:
    plan = make_plan(["fp32", "bf16"], 4)
    runs = [*runs_of("fp32", {0: 1.0, 2: 3.0}), failed("fp32", 1), *runs_of("bf16", {1: 5.0, 2: 3.5, 3: 9.0})]
    metric = judge(plan, runs).arms["bf16"].metrics["val_loss"]
    assert metric.difference is not None
    assert metric.difference.values == (0.5,)
    assert metric.finals == {1: 5.0, 2: 3.5, 3: 9.0}


def test_differences_of_what_is_not_finite() -> None:
    report = compared({"fp32": [1.0, 1.0, math.inf], "bf16": [math.nan, math.inf, 1.0]})
    difference = report.arms["bf16"].metrics["val_loss"].difference
    assert difference is not None
    assert (difference.num_not_finite, difference.num_reference_not_finite) == (3, 1)


def test_the_last_validation_and_the_best_one() -> None:
    plan = make_plan(["fp32", "bf16"], 1)
    runs = [make_run("fp32", 0, curves={"val_loss": curve(3.0, 1.0, 2.0), "val_acc": curve(0.1, 0.9, 0.8)})]
    metrics = judge(plan, runs).arms["fp32"].metrics
    assert (metrics["val_loss"].finals, metrics["val_loss"].bests) == ({0: 2.0}, {0: 1.0})
    assert (metrics["val_acc"].finals, metrics["val_acc"].bests) == ({0: 0.8}, {0: 0.9})


# -- better directions -------------------------------------------------------------------------------------------------


def test_torchmetrics_wins_over_the_user_and_the_user_over_the_name() -> None:
    plan = make_plan(["fp32"], 1, {"val_loss": Margin(0.1, "max"), "val_acc": Margin(0.1)})
    known = [make_run(directions={"val_loss": "min", "thing": "max"})]
    assert direction(plan, "val_loss", known) == "min"
    assert direction(plan, "val_loss", [make_run()]) == "max"
    assert direction(plan, "val_acc", known) == "max"
    assert direction(plan, "thing", known) == "max"
    assert direction(plan, "thing", [make_run()]) is None


def test_what_one_run_knows_all_know() -> None:
    """Only some of the runs may have asked torchmetrics."""
    plan = make_plan(["fp32", "bf16", "fp16"], 1, {"val_loss": 0.1})
    runs = [
        *runs_of("fp32", {0: 1.0}),
        *runs_of("bf16", {0: 1.0}),
        *runs_of("fp16", {0: 1.0}, directions={"val_loss": "max"}),
    ]
    assert {arm.metrics["val_loss"].direction for arm in judge(plan, runs).arms.values()} == {"max"}


@pytest.mark.parametrize(("way", "verdict"), [("min", "worse"), ("max", "not worse")])
def test_a_verdict_goes_the_way_of_the_metric(way: str, verdict: str) -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"thing": Margin(0.1, way)})
    runs = [
        *runs_of("fp32", dict.fromkeys(range(3), 1.0), "thing"),
        *runs_of("bf16", {0: 3.0, 1: 3.1, 2: 2.9}, "thing"),
    ]
    assert judge(plan, runs).arms["bf16"].metrics["thing"].verdict.claim == verdict


def test_without_a_direction_nothing_is_better() -> None:
    metric = compared({"fp32": [1.0], "bf16": [2.0]}, margin=None, name="thing").arms["bf16"].metrics["thing"]
    assert (metric.direction, metric.bests, metric.time_to_quality_s) == (None, {}, {})
    assert str(metric.verdict) == "no margin"
    assert metric.difference is not None
    assert metric.difference.values == (1.0,)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_margins_that_are_missing() -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1})
    runs = [
        make_run(label, seed, curves={"val_loss": curve(1.0), "val_acc": curve(0.5)})
        for label in plan.arms
        for seed in range(3)
    ]
    metrics = judge(plan, runs).arms["bf16"].metrics
    assert metrics["val_loss"].verdict.claim == "not worse"
    assert str(metrics["val_acc"].verdict) == "no margin"
    assert (metrics["val_loss"].margin, metrics["val_acc"].margin) == (0.1, None)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_an_arm_that_failed_with_some_seeds_is_undecided(lost: int) -> None:
    """Runs that diverge fail, so that judging the others would bias the result."""
    finals = [None] * lost + [1.0] * (4 - lost)
    verdict = compared({"fp32": [1.0] * 4, "bf16": finals}).verdict("bf16", "val_loss")
    assert str(verdict).startswith(f"undecided: it failed with {lost} of 4 seeds")


@pytest.mark.parametrize("when", ["at once", "after a validation"])
def test_an_arm_that_failed_with_all_seeds_is_judged_all_the_same(when: str) -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1})
    curves = {} if when == "at once" else {"val_loss": curve(1.0)}
    runs = [*runs_of("fp32", dict.fromkeys(range(3), 1.0)), *(failed("bf16", seed, curves=curves) for seed in range(3))]
    metric = judge(plan, runs).arms["bf16"].metrics["val_loss"]
    assert str(metric.verdict).startswith("undecided: it failed with all 3 seeds")
    assert metric.finals == metric.bests == metric.time_to_quality_s == {}
    assert math.isnan(metric.final)


def test_a_run_that_finished_without_the_metric_is_lost_as_well() -> None:
    plan = make_plan(["fp32", "bf16"], 4, {"val_loss": 0.1})
    runs = [
        *runs_of("fp32", dict.fromkeys(range(4), 1.0)),
        *runs_of("bf16", dict.fromkeys(range(3), 1.0)),
        make_run("bf16", 3),
    ]
    verdict = judge(plan, runs).arms["bf16"].metrics["val_loss"].verdict
    assert verdict.because.startswith("it failed with 1 of 4 seeds, and judging only the surviving seeds")


def test_pairs_that_the_reference_lost_are_not_held_against_the_arm() -> None:
    verdict = compared({"fp32": [None, 1.0, 1.0, 1.0], "bf16": [None, 1.0, 1.0, 1.0]}).verdict("bf16", "val_loss")
    assert verdict.claim == "not worse"


def test_the_reference_failed() -> None:
    report = compared({"fp32": [None] * 3, "bf16": [1.0] * 3})
    assert str(report.verdict("bf16", "val_loss")).startswith("undecided: there is no pair of runs")
    assert report.arms["bf16"].speed is None


# -- the control -------------------------------------------------------------------------------------------------------


def test_the_control_is_judged_apart() -> None:
    """Its comparison does not make the arms' comparisons stricter, nor theirs the control's."""
    finals = {"fp32": [1.0, 1.1, 1.2], "bf16": [1.01, 1.12, 1.2]}
    alone = compared(finals).verdict("bf16", "val_loss")
    report = compared({**finals, CONTROL: [1.0, 1.1, 1.21]})
    assert report.verdict("bf16", "val_loss") == alone
    assert report.verdict(CONTROL, "val_loss").num_comparisons == 1
    control = report.arms[CONTROL]
    assert (control.is_control, control.is_reference, report.arms["bf16"].is_control) == (True, False, False)
    assert control.description == "AmpPrecision('fp32'), initial weights moved in their last bit"


def test_arms_are_judged_together() -> None:
    report = compared({"fp32": [1.0, 1.1, 1.2], "bf16": [1.01, 1.12, 1.2], "fp16": [1.02, 1.11, 1.2]})
    assert report.verdict("bf16", "val_loss").num_comparisons == 2


def test_order_and_descriptions() -> None:
    arms = compared({"b": [1.0], "a": [1.0], CONTROL: [1.0]}).arms
    assert list(arms) == ["b", "a", CONTROL]
    assert [arm.is_reference for arm in arms.values()] == [True, False, False]
    assert arms["b"].metrics["val_loss"].difference is None
    assert arms["b"].metrics["val_loss"].verdict.claim == "no margin"
    assert arms["a"].description == "AmpPrecision('a')"


# -- the same weights, and times ---------------------------------------------------------------------------------------


def test_rounding_in_the_evaluation() -> None:
    plan = make_plan(["fp32", "bf16"], 4)
    pairs = [(1.5, 1.0), (math.inf, math.inf), (math.nan, 1.0)]
    runs = [
        make_run("bf16", seed, curves={"val_loss": curve(pair[0])}, same_weights={"val_loss": pair, "else": (1.0, 2.0)})
        for seed, pair in enumerate(pairs)
    ]
    runs += [make_run("bf16", 3, curves={"val_loss": curve(1.0)})]
    found = judge(plan, runs).arms["bf16"].metrics["val_loss"].evaluation_diff
    assert (found[0], found[1], list(found)) == (0.5, 0.0, [0, 1, 2])
    assert math.isnan(found[2])


def test_time_to_the_reference_of_the_same_seed() -> None:
    plan = make_plan(["fp32", "bf16"], 4)
    finals = {0: 2.0, 1: 1.0, 2: math.nan}
    runs = runs_of("fp32", finals)
    runs += [make_run("bf16", seed, curves={"val_loss": curve(3.0, 2.0, 1.5)}) for seed in range(4)]
    arms = judge(plan, runs).arms
    assert arms["bf16"].metrics["val_loss"].time_to_quality_s == {0: 2.0, 1: math.inf}
    assert arms["fp32"].metrics["val_loss"].time_to_quality_s == {0: 1.0, 1: 1.0}


def test_the_quality_is_reached_within_the_margin() -> None:
    """An arm that ends 0.01 away, with a margin of 0.1, has not "never" come to the quality of the reference."""
    plan = make_plan(["fp32", "bf16"], 1, {"val_loss": 0.1, "val_acc": 0.1})
    runs = [
        make_run("fp32", 0, curves={"val_loss": curve(3.0, 1.0), "val_acc": curve(0.2, 0.9)}),
        make_run("bf16", 0, curves={"val_loss": curve(3.0, 1.01), "val_acc": curve(0.2, 0.85)}),
    ]
    metrics = judge(plan, runs).arms["bf16"].metrics
    assert [metric.time_to_quality_s for metric in metrics.values()] == [{0: 2.0}, {0: 2.0}]


def test_speed_against_the_reference() -> None:
    finals = dict.fromkeys(("fp32", "bf16", "fp16", "slow", CONTROL), SAME)
    step_s = {"fp32": 0.02, "bf16": 0.01, "fp16": 0.0201, "slow": 0.04, CONTROL: 0.0199}
    arms = compared(finals, step_s=step_s).arms
    claims = [arm.speed and arm.speed.claim for arm in arms.values()]
    assert claims == [None, "faster", "same", "slower", "same"]


def test_one_seed_has_a_ratio_and_no_claim() -> None:
    speed = compared({"fp32": [1.0], "bf16": [1.0]}, step_s={"fp32": 0.0208, "bf16": 0.016}).arms["bf16"].speed
    assert str(speed) == "1.3x as fast, one run of each"


def test_exactly_half_as_fast_again_in_every_paired_step_is_a_claim() -> None:
    """Batches differ eightfold in length, so that the quartiles of the steps overlap widely."""
    plan = make_plan(["fp32", "bf16"], 3)
    lengths = [0.01 * 8 ** (i % 97 / 96) for i in range(2000)]
    runs = [
        replace(make_run(label, seed), step_s=tuple(factor * s for s in lengths), timed_steps=tuple(range(2000)))
        for label, factor in (("fp32", 1.0), ("bf16", 1.5))
        for seed in range(3)
    ]
    assert str(judge(plan, runs).arms["bf16"].speed) == "1.50x as slow (1.50 to 1.50)"


def test_steps_are_paired_by_their_number() -> None:
    """One arm has no times of its first steps, which were short."""
    plan = make_plan(["fp32", "bf16"], 3)
    lengths = [0.01 if step < 20 else 0.08 for step in range(40)]
    runs = [
        replace(make_run(label, seed), step_s=tuple(lengths[first:]), timed_steps=tuple(range(first, 40)))
        for label, first in (("fp32", 0), ("bf16", 18))
        for seed in range(3)
    ]
    assert str(judge(plan, runs).arms["bf16"].speed) == "as fast within 5 %"


def test_the_control_widens_every_interval_if_the_machine_was_busy() -> None:
    finals = {"fp32": SAME, "bf16": SAME, CONTROL: SAME}
    quiet = compared(finals, step_s={"bf16": 0.008}).arms
    busy = compared(finals, step_s={"bf16": 0.008, CONTROL: 0.015}).arms
    assert [arm.speed and arm.speed.claim for arm in quiet.values()] == [None, "faster", "same"]
    assert [arm.speed and arm.speed.claim for arm in busy.values()] == [None, "undecided", "slower"]
    assert str(busy["bf16"].speed) == "speed undecided: 0.83x to 1.88x"


def test_nothing_ran() -> None:
    arms = judge(Plan("a", "b", {"fp32": "x", "bf16": "y"}, margins={"val_loss": Margin(0.1)}, control=True), []).arms
    assert list(arms) == ["fp32", "bf16", CONTROL]
    assert all(arm.metrics == {} and arm.runs == () and arm.speed is None for arm in arms.values())


def diverging(label: str, seed: int, *, logs_nan: bool) -> ArmRun:
    """Return a run with four validations; a diverging run logs finite values only, in the first two."""
    values = (3.0, 2.0, 1.5, 1.0 + 0.01 * seed) if logs_nan else (3.0, 2.0)
    return make_run(label, seed, curves={"val_loss": curve(*values)}, last_validation=40)


def test_a_metric_that_the_last_validation_left_out_is_not_taken_from_an_earlier_one() -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 5.0})
    runs = [diverging(label, seed, logs_nan=label == "fp32") for label in plan.arms for seed in range(3)]
    arm = judge(plan, runs).arms["bf16"]
    assert str(arm.metrics["val_loss"].verdict).startswith("worse: not finite with all 3 seeds")
    assert all(map(math.isnan, arm.metrics["val_loss"].finals.values()))


def test_a_metric_that_not_every_validation_logs() -> None:
    """If the reference does not log it either, the latest value counts."""
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 5.0})
    runs = [diverging(label, seed, logs_nan=False) for label in plan.arms for seed in range(3)]
    assert judge(plan, runs).arms["bf16"].metrics["val_loss"].finals == dict.fromkeys(range(3), 2.0)


@pytest.mark.parametrize("depends", [True, False])
def test_seeds_without_effect_are_no_pairs(depends: bool) -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 5.0})
    runs = [
        make_run(label, seed, curves={"val_loss": curve(1.0)}, loss=curve(2.0, 1.0 + seed * depends))
        for label in plan.arms
        for seed in range(3)
    ]
    verdict = judge(plan, runs).arms["bf16"].metrics["val_loss"].verdict
    assert str(verdict).startswith(
        "not worse" if depends else "undecided: the reference is the same run with seeds 0 and 1"
    )


def timed(label: str, seed: int, median: float, spread: float) -> ArmRun:
    return replace(make_run(label, seed), step_s=tuple(median * (1 + spread * i / 20) for i in range(20)))


def test_an_hour_in_which_all_was_slow_does_not_hide_the_ratio() -> None:
    plan = make_plan(["fp32", "fp16"], 3)
    busy = {0: 1.0, 1: 9.0, 2: 1.2}
    slow = [timed(label, s, t * busy[s], 0.1) for label, t in (("fp32", 0.01), ("fp16", 0.06)) for s in range(3)]
    assert str(judge(plan, slow).arms["fp16"].speed) == "6.00x as slow (6.00 to 6.00)"
    mixed = [*slow[:5], timed("fp16", 2, 0.001, 0.1)]
    speed = judge(plan, mixed).arms["fp16"].speed
    assert speed is not None
    assert speed.claim == "undecided"


def test_a_few_steps_say_nothing_about_speed() -> None:
    plan = make_plan(["fp32", "bf16"], 1)
    runs = [replace(make_run(label, 0), step_s=(time,) * 9) for label, time in (("fp32", 2.0), ("bf16", 1.0))]
    assert judge(plan, runs).arms["bf16"].speed is None


# -- speeds of runs that did not have a device for themselves ----------------------------------------------------------


def beside(label: str, seed: int, start: float, host: str = "a", **fields: Any) -> ArmRun:
    """Return a run of 10 s on the only device of a host; all but fp32 are twice as fast."""
    usual: dict[str, Any] = {"host": host, "devices": ("cuda:0",), "started_at": start, "ended_at": start + 10.0}
    step_s = 0.02 if label == "fp32" else 0.01
    run = make_run(label, seed, step_s, curves={"val_loss": curve(1.0 + 0.01 * seed)})
    return replace(run, **(usual | fields))


def series(*labels: str, shift: float = 10.0, **fields: Any) -> list[ArmRun]:
    """Return runs of three seeds that begin one after the other, `shift` seconds apart."""
    keys = [(label, seed) for seed in range(3) for label in labels]
    return [beside(label, seed, shift * i, **fields) for i, (label, seed) in enumerate(keys)]


def arm_of(runs: list[ArmRun], speed_runs: list[ArmRun] | None = None, **plan: Any) -> Any:
    judged = judge(make_plan(["fp32", "bf16"], 3, {"val_loss": 0.1}, **plan), runs, speed_runs or [])
    return judged.arms["bf16"], judged.recommendation


def test_runs_one_after_the_other_are_compared() -> None:
    arm, recommendation = arm_of(series("fp32", "bf16"))
    assert (arm.speed.claim, arm.not_compared) == ("faster", "")
    assert recommendation.label == "bf16"


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (series("fp32", "bf16", shift=5.0), "runs shared a device"),
        ([*series("fp32"), *series("bf16", device="H100")], "runs shared a device"),
        ([*series("fp32"), *series("bf16", host="b", device="H100")], "the runs had different devices"),
        ([*series("fp32"), *series("bf16", host="b", num_threads=3)], "the runs had different devices"),
        ([*series("fp32"), *series("bf16", host="b", step_s=(0.01,) * 5)], "fewer than 10 steady steps"),
    ],
)
def test_a_speed_that_is_not_compared(runs: list[ArmRun], why: str) -> None:
    """No recommendation rests on it: neither for speed, nor for memory at the same speed."""
    arm, recommendation = arm_of([replace(run, peak_memory_bytes=9 - 4 * (run.label == "bf16")) for run in runs])
    assert (arm.speed, arm.not_compared) == (None, why)
    assert arm.metrics["val_loss"].verdict.claim == "not worse"
    assert recommendation.label is None
    assert f"its speed was not compared: {why}" in recommendation.sentence


def test_another_host_of_the_same_model_is_compared() -> None:
    arm, _ = arm_of([*series("fp32"), *series("bf16", host="b")])
    assert (arm.speed.claim, arm.not_compared) == ("faster", "")


def test_only_the_seeds_whose_runs_were_alone_are_compared() -> None:
    runs = [*series("fp32", "bf16"), beside("other", 0, 25.0)]
    plan = make_plan(["fp32", "bf16", "other"], 3)
    arm = judge(plan, runs).arms["bf16"]
    assert arm.speed is not None
    assert arm.speed.num_repetitions == 2


def test_a_run_of_another_arm_disturbs_as_well() -> None:
    runs = [*series("fp32", "bf16"), beside("other", 0, 0.0, ended_at=100.0)]
    arm = judge(make_plan(["fp32", "bf16", "other"], 3), runs).arms["bf16"]
    assert (arm.speed, arm.not_compared) == (None, "runs shared a device")


def test_without_a_measurement_of_speed() -> None:
    arm, recommendation = arm_of(series("fp32", "bf16"), measure_speed="off")
    assert (arm.speed, arm.not_compared) == (None, "`measure_speed=False`")
    assert recommendation.label is None


def test_speed_of_short_runs_alone() -> None:
    """The trainings shared a device, the short runs after them did not."""
    runs = series("fp32", "bf16", shift=5.0)
    short = [replace(run, started_at=run.started_at + 500.0, ended_at=run.ended_at + 500.0) for run in runs]
    alone = [replace(run, started_at=500.0 + 10 * i, ended_at=510.0 + 10 * i) for i, run in enumerate(short)]
    arm, recommendation = arm_of(runs, alone, measure_speed="alone")
    assert (arm.speed.claim, arm.not_compared) == ("faster", "")
    assert len(arm.speed_runs) == 3
    assert recommendation.label == "bf16"
    assert arm_of(runs, short, measure_speed="alone")[0].not_compared == "runs shared a device"
    arm, _ = arm_of(series("fp32", "bf16"), measure_speed="alone")
    assert (arm.speed, arm.speed_runs) == (None, ())
    assert arm.not_compared == "the short runs that measure it failed or are missing"
    beside_a_training = [replace(run, started_at=run.started_at - 490.0) for run in alone]
    assert arm_of(runs, beside_a_training, measure_speed="alone")[0].not_compared == "runs shared a device"
