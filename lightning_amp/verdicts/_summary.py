"""From what the runs left to what a person reads: arms, metrics, differences, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_amp.verdicts._arm import Arm, ArmMetric, best, time_to
from lightning_amp.verdicts._arm_run import ArmRun
from lightning_amp.verdicts._directions import direction_of
from lightning_amp.verdicts._plan import CONTROL, Plan
from lightning_amp.verdicts._statistics import Difference, Direction, Hypothesis, speed_in_words, verdicts


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
            speed="",
        )
    return {label: replace(arm, speed=_speed(arms, label, plan)) for label, arm in arms.items()}


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
    for labels in ([label for label in plan.arms if label != plan.reference], [CONTROL] if plan.control else []):
        hypotheses: dict[tuple[str, str], Hypothesis] = {}
        for label in labels:
            for name, way in ways.items():
                if name in plan.margins and way is not None:
                    difference, num_failed = _difference(name, of[label], of[plan.reference])
                    margin = plan.margins[name].value
                    hypotheses[label, name] = Hypothesis(difference, way, margin, num_failed)
        found.update(verdicts(hypotheses))
    return found


def _difference(name: str, own: Sequence[ArmRun], reference: Sequence[ArmRun]) -> tuple[Difference, int]:
    """Return the differences paired by seed, and how many pairs are lost: the arm failed there, or did not log it."""
    theirs = {run.seed: run.curves[name][-1].value for run in reference if run.finished and run.curves.get(name)}
    ours = {run.seed: run.curves[name][-1].value for run in own if run.finished and run.curves.get(name)}
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
    targets = {run.seed: run.curves[name][-1].value for run in reference if run.finished and run.curves.get(name)}
    verdict = "no margin: it is what the others are compared with" if is_reference else "no margin"
    return ArmMetric(
        name=name,
        direction=way,
        finals={seed: run.curves[name][-1].value for seed, run in logged.items()},
        bests={} if way is None else {seed: best(run.curves[name], way) for seed, run in logged.items()},
        difference=None if is_reference else _difference(name, own, reference)[0],
        margin=plan.margins[name].value if name in plan.margins else None,
        verdict=judged.get((label, name), verdict),
        evaluation_diff={
            seed: _minus(*run.same_weights[name]) for seed, run in logged.items() if name in run.same_weights
        },
        time_to_quality_s={}
        if way is None
        else {
            seed: time_to(run.curves[name], targets[seed], way)
            for seed, run in logged.items()
            if seed in targets and not math.isnan(targets[seed])
        },
    )


def _minus(amp: float, fp32: float) -> float:
    return 0.0 if amp == fp32 else amp - fp32  # infinities, too


def _speed(arms: Mapping[str, Arm], label: str, plan: Plan) -> str:
    own, theirs = arms[label].step_s, arms[plan.reference].step_s
    if label == plan.reference or own is None or theirs is None:
        return ""
    control = arms[CONTROL].step_s if plan.control and label != CONTROL else None
    return speed_in_words(own, theirs, control)
