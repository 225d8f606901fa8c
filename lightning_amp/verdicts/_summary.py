"""From what the runs left to what a person reads: arms, metrics, differences, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_amp.measure import SpeedComparison, paired_log_ratio
from lightning_amp.verdicts._arm import Arm, ArmMetric, best, time_to
from lightning_amp.verdicts._arm_run import ArmRun
from lightning_amp.verdicts._directions import direction_of
from lightning_amp.verdicts._plan import CONTROL, Plan
from lightning_amp.verdicts._statistics import Difference, Direction, Hypothesis, verdicts


def summarize(plan: Plan, runs: Sequence[ArmRun]) -> dict[str, Arm]:
    """Return the arms by label, in order."""
    of: dict[str, list[ArmRun]] = {label: [run for run in runs if run.label == label] for label in plan.labels}
    names = dict.fromkeys(name for run in runs for name in run.curves)
    ways: dict[str, Direction | None] = {name: direction(plan, name, runs) for name in names}
    judged = _judge(plan, of, ways)
    arms: dict[str, Arm] = {}
    for label, own in of.items():
        metrics = {
            name: _metric(plan, name, way, label, of, judged)
            for name, way in ways.items()
            if (label, name) in judged or any(name in run.curves for run in own)
        }
        arms[label] = Arm(
            label=label,
            description=_description(plan, label),
            is_reference=label == plan.reference,
            is_control=label == CONTROL and label not in plan.arms,
            runs=tuple(own),
            metrics=metrics,
            speed=_speed(plan, of, label),
        )
    return arms


def direction(plan: Plan, name: str, runs: Sequence[ArmRun]) -> Direction | None:
    """Return which way a metric is better: what torchmetrics says, what the user says, or what its name says."""
    known = next((run.directions[name] for run in runs if name in run.directions), None)
    given = plan.margins[name].direction if name in plan.margins else None
    way = known or given
    return ("min" if way == "min" else "max") if way else direction_of(name)


def _description(plan: Plan, label: str) -> str:
    if label in plan.arms:
        return plan.arms[label]
    return f"{plan.arms[plan.reference]}, initial weights moved in their last bit"


def _judge(
    plan: Plan, of: Mapping[str, list[ArmRun]], ways: Mapping[str, Direction | None]
) -> dict[tuple[str, str], str]:
    """Judge all arms in all metrics with a margin together, and the control apart: it is not what is asked about."""
    found: dict[tuple[str, str], str] = {}
    for labels in (_compared(plan), [CONTROL] if plan.control else []):
        hypotheses: dict[tuple[str, str], Hypothesis] = {}
        for label in labels:
            for name, way in ways.items():
                if name in plan.margins and way is not None:
                    difference, num_failed = _difference(name, of[label], of[plan.reference])
                    margin = plan.margins[name].value
                    hypotheses[label, name] = Hypothesis(difference, way, margin, num_failed)
        found.update(verdicts(hypotheses))
    same = _seeds_of_one_run(of[plan.reference])
    if same:
        text = f"undecided: the reference is the same run with seeds {same}, so that they are no independent pairs"
        found = {key: verdict if verdict.startswith("undecided") else text for key, verdict in found.items()}
    return found


def _compared(plan: Plan) -> list[str]:
    return [label for label in plan.arms if label != plan.reference]


def _seeds_of_one_run(reference: Sequence[ArmRun]) -> str:
    """Name two seeds that gave the same run, in every loss and metric: nothing in it depends on the seed."""
    seen: dict[object, int] = {}
    for run in reference:
        if run.finished and run.loss:
            values = tuple((name, tuple(p.value for p in points)) for name, points in run.curves.items())
            key = (values, tuple(p.value for p in run.loss))
            if key in seen:
                return f"{seen[key]} and {run.seed}"
            seen[key] = run.seed
    return ""


def _finals(name: str, own: Sequence[ArmRun], reference: Sequence[ArmRun]) -> dict[int, float]:
    """Return the value of the last validation, by seed.

    It is NaN where the last validation did not log the metric, and that of the reference did: a module that leaves out
    what is not finite must not be judged by what it logged before.

    """
    always = {run.seed for run in reference if run.finished and name in run.curves and _is_last(run, name)}
    return {
        run.seed: run.curves[name][-1].value if _is_last(run, name) or run.seed not in always else math.nan
        for run in own
        if run.finished and run.curves.get(name)
    }


def _is_last(run: ArmRun, name: str) -> bool:
    return bool(run.curves[name]) and run.curves[name][-1].step >= run.last_validation


def _difference(name: str, own: Sequence[ArmRun], reference: Sequence[ArmRun]) -> tuple[Difference, int]:
    """Return the differences paired by seed, and how many pairs are lost: the arm failed there, or did not log it."""
    theirs, ours = _finals(name, reference, reference), _finals(name, own, reference)
    lost = sum(run.seed in theirs and run.seed not in ours for run in own)
    return Difference.of((ours[seed], theirs[seed]) for seed in theirs if seed in ours), lost


def _metric(
    plan: Plan,
    name: str,
    way: Direction | None,
    label: str,
    of: Mapping[str, list[ArmRun]],
    judged: Mapping[tuple[str, str], str],
) -> ArmMetric:
    own, reference = of[label], of[plan.reference]
    is_reference = label == plan.reference
    logged = {run.seed: run for run in own if run.finished and run.curves.get(name)}
    targets = _finals(name, reference, reference)
    margin = plan.margins[name].value if name in plan.margins else None
    allowed = (margin or 0.0) * (1 if way == "min" else -1)
    verdict = "no margin: it is what the others are compared with" if is_reference else "no margin"
    return ArmMetric(
        name=name,
        direction=way,
        finals=_finals(name, own, reference),
        bests={} if way is None else {seed: best(run.curves[name], way) for seed, run in logged.items()},
        difference=None if is_reference else _difference(name, own, reference)[0],
        margin=margin,
        verdict=judged.get((label, name), verdict),
        evaluation_diff={
            seed: _minus(*run.same_weights[name]) for seed, run in logged.items() if name in run.same_weights
        },
        time_to_quality_s={}
        if way is None
        else {
            seed: time_to(run.curves[name], targets[seed] + allowed, way)
            for seed, run in logged.items()
            if seed in targets and not math.isnan(targets[seed])
        },
        num_hypotheses=max(1, sum(key[0] in _compared(plan) for key in judged)),
    )


def _minus(amp: float, fp32: float) -> float:
    return 0.0 if amp == fp32 else amp - fp32  # infinities, too


_LEAST_STEPS = 10


def _speed(plan: Plan, of: Mapping[str, list[ArmRun]], label: str) -> SpeedComparison | None:
    """Compare an arm's speed with the reference's, by what the control says about the machine.

    The control computes the same as the reference. If it is clearly faster or slower, the machine was busy with one of
    them, and may have been with any other arm: every interval is widened by that factor.
    """
    if label == plan.reference:
        return None
    found = _compared_by_seed(of[label], of[plan.reference])
    if found is None or label == CONTROL or not plan.control:
        return found
    control = _compared_by_seed(of[CONTROL], of[plan.reference])
    return found.widened(control.ratio) if control is not None and control.differs else found


def _compared_by_seed(own: Sequence[ArmRun], reference: Sequence[ArmRun]) -> SpeedComparison | None:
    theirs = {run.seed: run.seconds_of_steps() for run in reference if run.finished}
    log_ratios: list[float] = []
    for run in own:
        times, reference_times = run.seconds_of_steps(), theirs.get(run.seed, {})
        both = sorted(times.keys() & reference_times.keys())
        if run.finished and len(both) >= _LEAST_STEPS:
            log_ratios.append(paired_log_ratio([times[i] for i in both], [reference_times[i] for i in both]))
    return SpeedComparison.of(log_ratios) if log_ratios else None
