"""From runs to arms: pairs, better directions, verdicts, missing runs and speeds; and the JSON file."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.reports import REPORTS, make_report
from support.synthetic import compared, curve, failed, make_plan, make_run

from lightning_amp.compare import CONTROL, Margin, PrecisionReport, Run
from lightning_amp.compare._run import to_data

SAME = [1.0, 1.1, 1.2]


def runs_of(label: str, finals: dict[int, float], name: str = "val_loss", **fields: Any) -> list[Run]:
    return [make_run(label, seed, curves={name: curve(value)}, **fields) for seed, value in finals.items()]


def metric_of(plan: Any, runs: list[Run], name: str = "val_loss", label: str = "bf16") -> Any:
    return PrecisionReport(plan, runs).arms[label].metrics[name]


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_pairs_are_of_a_seed_and_not_of_a_position() -> None:
    plan = make_plan(["fp32", "bf16"], 4, {"val_loss": 0.05})
    theirs = {0: 10.0, 1: 20.0, 2: 30.0, 3: 40.0}
    ours = {seed: value + 0.01 + 0.001 * seed for seed, value in theirs.items()}
    runs = [*runs_of("fp32", theirs), *runs_of("bf16", ours)]
    random.Random(1).shuffle(runs)
    metric = metric_of(plan, runs)
    assert metric.difference.values == pytest.approx([0.010, 0.011, 0.012, 0.013])
    assert metric.verdict.claim == "not worse"


def test_the_last_validation_and_the_best_one() -> None:
    plan = make_plan(["fp32"], 1)
    runs = [make_run("fp32", 0, curves={"val_loss": curve(3.0, 1.0, 2.0), "val_acc": curve(0.1, 0.9, 0.8)})]
    metrics = PrecisionReport(plan, runs).arms["fp32"].metrics
    assert (metrics["val_loss"].finals, metrics["val_loss"].bests) == ({0: 2.0}, {0: 1.0})
    assert (metrics["val_acc"].finals, metrics["val_acc"].bests) == ({0: 0.8}, {0: 0.9})


def test_torchmetrics_wins_over_the_user_and_the_user_over_the_name() -> None:
    plan = make_plan(["fp32"], 1, {"val_loss": Margin(0.1, "max"), "thing": Margin(0.1)})
    names = {name: curve(1.0) for name in ("val_loss", "val_acc", "thing")}
    known = [make_run(curves=names, directions={"val_loss": "min", "thing": "max"})]
    for runs, expected in (
        (known, {"val_loss": "min", "val_acc": "max", "thing": "max"}),
        ([make_run(curves=names)], {"val_loss": "max", "val_acc": "max", "thing": None}),
    ):
        metrics = PrecisionReport(plan, runs).arms["fp32"].metrics
        assert {name: metric.direction for name, metric in metrics.items()} == expected


@pytest.mark.parametrize(("way", "verdict"), [("min", "worse"), ("max", "not worse")])
def test_a_verdict_goes_the_way_of_the_metric(way: Any, verdict: str) -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"thing": Margin(0.1, way)})
    runs = runs_of("fp32", dict.fromkeys(range(3), 1.0), "thing")
    runs += runs_of("bf16", {0: 3.0, 1: 3.1, 2: 2.9}, "thing")
    assert metric_of(plan, runs, "thing").verdict.claim == verdict


def test_a_coarse_metric_with_equal_values_is_undecided() -> None:
    """The fault: accuracies on 100 rows that are equal with three seeds were "not worse" within a margin of 0.001."""
    plan = make_plan(["fp32", "bf16"], 3, {"val_acc": 0.001})
    runs = [
        make_run(label, seed, curves={"val_acc": curve(0.5, 0.93, 0.94 + 0.01 * seed)})
        for label in plan.arms
        for seed in range(3)
    ]
    verdict = PrecisionReport(plan, runs).verdict("bf16", "val_acc")
    assert (verdict.claim, verdict.sd) == ("undecided", pytest.approx(0.01))
    constant = [replace(run, curves={"val_acc": curve(1.0, 1.0)}) for run in runs]
    assert "never changed" in str(PrecisionReport(plan, constant).verdict("bf16", "val_acc"))


# -- runs that failed or are missing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "claim"), [(1.0, "not worse"), (1.5, "undecided")])
def test_equal_values_prove_something_only_if_whole_runs_are_equal(loss: float, claim: str) -> None:
    """Here a coarse metric has equal values in both arms, whose training losses are equal to the bit or are not."""
    runs = [
        make_run(arm, seed, curves={"val_acc": curve(0.5, 0.9)}, loss=curve(seed + (loss if arm == "bf16" else 1.0)))
        for arm in ("fp32", "bf16")
        for seed in range(3)
    ]
    report = PrecisionReport(make_plan(["fp32", "bf16"], 3, {"val_acc": 0.001}), runs)
    assert report.verdict("bf16", "val_acc").claim == claim


@pytest.mark.parametrize("how", ["failed", "missing", "failed after a validation", "did not log it"])
@pytest.mark.parametrize("label", ["fp32", "bf16"])
def test_a_run_without_a_value_counts_against_every_claim(how: str, label: str, tmp_path: Path) -> None:
    """Runs that diverge fail, so that judging the others would bias the result."""
    plan = make_plan(["fp32", "bf16"], 4, {"val_loss": 0.1})
    finals = {seed: 1.0 + 0.01 * seed for seed in range(4)}
    runs = [run for arm in plan.arms for run in runs_of(arm, finals) if (run.label, run.seed) != (label, 2)]
    assert metric_of(replace(plan, num_seeds=2), runs).verdict.num_pairs == 2
    lost = {
        "failed": [failed(label, 2)],
        "missing": [],
        "failed after a validation": [failed(label, 2, curves={"val_loss": curve(1.0)})],
        "did not log it": [make_run(label, 2)],
    }
    report = PrecisionReport(plan, [*runs, *lost[how]])
    says = "undecided: a run failed or is missing with 1 of 4 seeds"
    assert str(report.verdict("bf16", "val_loss")).startswith(says)
    assert report.recommended is None
    assert (2 in report.arms[label].errors) == (how != "did not log it")
    if how == "missing":
        report.to_json(tmp_path / "report.json")
        report.to_html(tmp_path / "report.html")
        again = PrecisionReport.from_json(tmp_path / "report.json")
        for text in (str(report), str(again), (tmp_path / "report.html").read_text()):
            assert "it left no record" in text
        assert json.loads((tmp_path / "report.json").read_text())["verdicts"]["bf16"]["val_loss"].startswith(says)


def test_nothing_ran() -> None:
    arms = PrecisionReport(make_plan(["fp32", "bf16"], 2, {"val_loss": 0.1}, control=True), []).arms
    assert list(arms) == ["fp32", "bf16", CONTROL]
    assert all(arm.metrics == {} and len(arm.errors) == 2 and arm.speed is None for arm in arms.values())


def diverging(label: str, seed: int, *, logs_nan: bool) -> Run:
    """Return a run with four validations; a diverging run logs finite values only, in the first two."""
    values = (3.0, 2.0, 1.5, 1.0 + 0.01 * seed) if logs_nan else (3.0, 2.0)
    return make_run(label, seed, curves={"val_loss": curve(*values)}, last_validation=40)


def test_a_metric_that_the_last_validation_left_out_is_not_taken_from_an_earlier_one() -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 5.0})
    runs = [diverging(label, seed, logs_nan=label == "fp32") for label in plan.arms for seed in range(3)]
    assert str(metric_of(plan, runs).verdict).startswith("worse: not finite with all 3 seeds")
    runs = [diverging(label, seed, logs_nan=False) for label in plan.arms for seed in range(3)]
    assert metric_of(plan, runs).finals == dict.fromkeys(range(3), 2.0)


@pytest.mark.parametrize("depends", [True, False])
def test_seeds_without_effect_are_no_pairs(depends: bool) -> None:
    plan = make_plan(["fp32", "bf16"], 3, {"val_loss": 5.0})
    runs = [
        make_run(label, seed, curves={"val_loss": curve(2.0, 1.0)}, loss=curve(2.0, 1.0 + seed * depends))
        for label in plan.arms
        for seed in range(3)
    ]
    says = "not worse" if depends else "undecided: two seeds give the same run of the reference"
    assert str(metric_of(plan, runs).verdict).startswith(says)


# -- arms --------------------------------------------------------------------------------------------------------------


def test_the_reference_is_not_judged_and_the_control_is_judged_apart() -> None:
    """Its comparison does not make the arms' comparisons stricter, nor theirs the control's."""
    finals = {"fp32": SAME, "bf16": [1.01, 1.12, 1.2]}
    report = compared({**finals, "fp16": SAME, CONTROL: [1.0, 1.1, 1.21]})
    assert report.verdict("bf16", "val_loss").num_comparisons == 2
    assert report.verdict(CONTROL, "val_loss").num_comparisons == 1
    assert list(report.arms) == ["fp32", "bf16", "fp16", CONTROL]
    assert [arm.is_reference for arm in report.arms.values()] == [True, False, False, False]
    assert [arm.is_control for arm in report.arms.values()] == [False, False, False, True]
    reference, control = report.arms["fp32"].metrics["val_loss"], report.arms[CONTROL]
    assert (reference.difference, reference.verdict.claim) == (None, "no margin")
    assert control.description == "AmpPrecision('fp32'), initial weights moved in their last bit"


def test_rounding_in_the_evaluation() -> None:
    pairs = [(1.5, 1.0), (math.inf, math.inf), (math.nan, 1.0)]
    runs = [
        make_run("bf16", seed, curves={"val_loss": curve(pair[0])}, same_weights={"val_loss": pair, "else": (1.0, 2.0)})
        for seed, pair in enumerate(pairs)
    ]
    found = metric_of(make_plan(["fp32", "bf16"], 4), runs).evaluation_diff
    assert (found[0], found[1], list(found)) == (0.5, 0.0, [0, 1, 2])
    assert math.isnan(found[2])


def test_time_to_the_reference_of_the_same_seed_within_the_margin() -> None:
    plan = make_plan(["fp32", "bf16"], 4, {"val_acc": 0.1})
    runs = runs_of("fp32", {0: 2.0, 1: 1.0, 2: math.nan})
    runs += [make_run("bf16", seed, curves={"val_loss": curve(3.0, 2.0, 1.5)}) for seed in range(4)]
    assert metric_of(plan, runs).time_to_quality_s == {0: 2.0, 1: math.inf}
    runs = runs_of("fp32", {0: 0.9}, "val_acc")
    runs += [make_run("bf16", 0, curves={"val_acc": curve(0.2, 0.85)})]
    assert metric_of(plan, runs, "val_acc").time_to_quality_s == {0: 2.0}


# -- speeds ------------------------------------------------------------------------------------------------------------


def test_speed_against_the_reference() -> None:
    finals = dict.fromkeys(("fp32", "bf16", "fp16", "slow", CONTROL), SAME)
    step_s = {"fp32": 0.02, "bf16": 0.01, "fp16": 0.0201, "slow": 0.04, CONTROL: 0.0199}
    arms = compared(finals, step_s=step_s).arms
    assert [arm.speed and arm.speed.claim for arm in arms.values()] == [None, "faster", "same", "slower", "same"]
    speed = compared({"fp32": [1.0], "bf16": [1.0]}, step_s={"fp32": 0.0208, "bf16": 0.016}).arms["bf16"].speed
    assert str(speed) == "1.3x as fast, one run of each"


def test_steps_are_paired_by_their_number() -> None:
    """One arm has no times of its first steps, which were short."""
    lengths = [0.01 if step < 20 else 0.08 for step in range(40)]
    runs = [
        replace(make_run(label, seed), step_s=tuple(lengths[first:]), timed_steps=tuple(range(first, 40)))
        for label, first in (("fp32", 0), ("bf16", 18))
        for seed in range(3)
    ]
    assert str(PrecisionReport(make_plan(["fp32", "bf16"], 3), runs).arms["bf16"].speed) == "as fast within 5 %"


def beside(label: str, seed: int, start: float, host: str = "a", **fields: Any) -> Run:
    """Return a run of 10 s on the only device of a host; all but fp32 are twice as fast."""
    usual: dict[str, Any] = {"host": host, "devices": ("cuda:0",), "started_at": start, "ended_at": start + 10.0}
    step_s = 0.02 if label == "fp32" else 0.01
    return replace(make_run(label, seed, step_s, curves={"val_loss": curve(1.0 + 0.01 * seed)}), **(usual | fields))


def series(*labels: str, shift: float = 10.0, **fields: Any) -> list[Run]:
    """Return runs of three seeds that begin one after the other, `shift` seconds apart."""
    keys = [(label, seed) for seed in range(3) for label in labels]
    return [beside(label, seed, shift * i, **fields) for i, (label, seed) in enumerate(keys)]


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (series("fp32", "bf16"), ""),
        ([*series("fp32"), *series("bf16", host="b")], ""),
        (series("fp32", "bf16", shift=5.0), "runs shared a device"),
        ([*series("fp32", "bf16"), beside("other", 0, 0.0, ended_at=100.0)], "runs shared a device"),
        ([*series("fp32"), *series("bf16", host="b", device="H100")], "the runs had different devices"),
        ([*series("fp32"), *series("bf16", host="b", num_threads=3)], "the runs had different devices"),
        ([*series("fp32"), *series("bf16", host="b", step_s=(0.01,) * 5)], "fewer than 10 steady steps"),
    ],
)
def test_which_speeds_are_compared(runs: list[Run], why: str) -> None:
    """No recommendation rests on one that is not: neither for speed, nor for memory at the same speed."""
    runs = [replace(run, peak_memory_bytes=9 - 4 * (run.label == "bf16")) for run in runs]
    plan = make_plan(["fp32", "bf16", *({run.label for run in runs} - {"fp32", "bf16"})], 3, {"val_loss": 0.1})
    report = PrecisionReport(plan, runs)
    arm = report.arms["bf16"]
    assert arm.not_compared == why
    assert (arm.speed is None) == bool(why)
    assert arm.metrics["val_loss"].verdict.claim == "not worse"
    assert report.recommended == (None if why else "bf16")
    assert not why or f"its speed was not compared: {why}" in report.recommendation


# -- JSON --------------------------------------------------------------------------------------------------------------


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("kind", [kind for kind in REPORTS if kind != "many"])  # which takes seconds
@pytest.mark.few(5)
def test_json_is_the_source(kind: str, tmp_path: Path) -> None:
    report, path = REPORTS[kind](), tmp_path / "new" / "report.json"
    report.to_json(path)
    again = PrecisionReport.from_json(path)
    assert again.to_markdown() == report.to_markdown()
    assert (again.recommended, again.recommendation) == (report.recommended, report.recommendation)
    first = path.read_bytes().decode("utf-8", errors="strict")
    data = json.loads(first, parse_constant=refuse)
    assert (data["recommended"], list(data["verdicts"])) == (report.recommended, list(report.arms))
    again.to_json(path)
    assert path.read_text() == first


GOOD: dict[str, Any] = {
    "format": 2,
    "plan": to_data(make_plan(["fp32", "bf16"], 1)),
    "runs": [to_data(make_run("fp32")), to_data(make_run("bf16"))],
}


def changed(**changes: Any) -> bytes:
    return json.dumps({name: value for name, value in {**GOOD, **changes}.items() if value is not ...}).encode()


BROKEN: dict[str, bytes] = {
    "torn": json.dumps(GOOD).encode()[:-40],
    "no text": b"\xff\xfe\x00{",
    "a list": b"[]",
    "deep": b"[" * 200_000,
    "another format": changed(format=1),
    "no plan": changed(plan=...),
    "a plan without arms": changed(plan={**GOOD["plan"], "arms": {}}),
    "a broken plan": changed(plan={**GOOD["plan"], "num_seeds": "one"}),
    "runs are no list": changed(runs=3),
    "a broken run": changed(runs=[{**GOOD["runs"][0], "loss": [[0]]}]),
    "a run without a seed": changed(runs=[{**GOOD["runs"][0], "seed": None}]),
    "a text for a number": changed(runs=[{**GOOD["runs"][0], "train_s": "long"}]),
    "a direction": changed(runs=[{**GOOD["runs"][0], "directions": {"a": "up"}}]),
    "a run twice": changed(runs=GOOD["runs"] * 2),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "my report.json"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(ValueError, match=r"my report\.json` is not what `PrecisionReport\.to_json` writes: \S"):
        PrecisionReport.from_json(path)


def test_unknown_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(changed(made_by="a newer version", runs=[{**run, "mood": "good"} for run in GOOD["runs"]]))
    assert list(PrecisionReport.from_json(path).arms) == ["fp32", "bf16"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        PrecisionReport.from_json(tmp_path / "nowhere")


# -- the object --------------------------------------------------------------------------------------------------------


def test_the_order_of_the_runs_does_not_matter_and_others_are_left_out() -> None:
    report = make_report(3, 3)
    runs = [run for arm in report.arms.values() for run in arm.runs] + [make_run("fp64"), make_run("fp32", 7)]
    random.Random(3).shuffle(runs)
    again = PrecisionReport(report.plan, iter(runs))
    assert str(again) == str(report)
    assert [run.seed for run in again.arms["bf16"].runs] == [0, 1, 2]


def test_what_does_not_exist() -> None:
    report = compared({"fp32": [1.0], "bf16": [1.0]})
    with pytest.raises(KeyError, match=r"There is no arm 'fp64'; there are \['fp32', 'bf16'\]"):
        report.verdict("fp64", "val_loss")
    with pytest.raises(KeyError, match=r"There is no metric 'val_acc' of the arm 'bf16'; there are \['val_loss'\]"):
        report.verdict("bf16", "val_acc")
    arms: Any = report.arms
    with pytest.raises(TypeError):
        arms["fp64"] = arms["fp32"]


def test_texts_and_copies() -> None:
    report = make_report(2, 3)
    assert repr(report) == "PrecisionReport(['fp32', 'bf16', 'control'], seeds [0, 1, 2])"
    assert str(report) == report.to_markdown() == str(pickle.loads(pickle.dumps(report))) == str(copy.deepcopy(report))
    assert str(report).startswith(report.recommendation)
