"""From what the runs left to what a person reads: arms, metrics, differences, verdicts, speeds, a recommendation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from typing_extensions import final

from lightning_amp.compare._arm import Arm, ArmMetric, best, time_to
from lightning_amp.compare._directions import direction_of
from lightning_amp.compare._plan import CONTROL, Plan
from lightning_amp.compare._recommendation import Recommendation, recommend
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._statistics import Difference, Direction, Hypothesis
from lightning_amp.compare._verdict import Verdict, verdicts
from lightning_amp.measure import SpeedComparison, paired_log_ratio

_LEAST_STEPS = 10
"""With fewer steady steps that two runs both have, nothing is said about their speeds."""

_Judged = Mapping[tuple[str, str], Verdict]
"""By arm and metric, of those that have a margin."""


@final
@dataclass(frozen=True)
class Judgement:
    """What a comparison came to; texts, pages and charts show it."""

    plan: Plan
    arms: Mapping[str, Arm]
    recommendation: Recommendation


def judge(plan: Plan, runs: Sequence[ArmRun]) -> Judgement:
    """Sum up the runs by arm, judge each arm in each metric, and recommend one."""
    arms = MappingProxyType(_Runs(plan, runs).arms())
    return Judgement(plan, arms, recommend(arms))


@final
class _Runs:
    """The runs of a comparison by arm, beside those of the reference."""

    def __init__(self, plan: Plan, runs: Sequence[ArmRun]) -> None:
        self._plan = plan
        self._of = {label: [run for run in runs if run.label == label] for label in plan.labels}
        self._reference = self._of[plan.reference]
        names = dict.fromkeys(name for run in runs for name in run.curves)
        self._directions: dict[str, Direction | None] = {name: direction(plan, name, runs) for name in names}
        self._compared = [label for label in plan.arms if label != plan.reference]

    def arms(self) -> dict[str, Arm]:
        """Return the arms by label, in order."""
        plan, judged = self._plan, self._judge()
        arms: dict[str, Arm] = {}
        for label, own in self._of.items():
            is_control = label == CONTROL and label not in plan.arms
            metrics = {
                name: self._metric(name, label, judged)
                for name in self._directions
                if (label, name) in judged or any(name in run.curves for run in own)
            }
            moved = f"{plan.arms[plan.reference]}, initial weights moved in their last bit"
            arms[label] = Arm(
                label=label,
                description=moved if is_control else plan.arms[label],
                is_reference=label == plan.reference,
                is_control=is_control,
                runs=tuple(own),
                metrics=metrics,
                speed=self._speed(label),
            )
        return arms

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def _judge(self) -> _Judged:
        """Judge all arms in all metrics with a margin together, and the control apart: nobody asked about it."""
        asked, control = self._hypotheses(self._compared), self._hypotheses([CONTROL] if self._plan.control else [])
        found = {**verdicts(asked), **verdicts(control)}
        same = _seeds_of_one_run(self._reference)
        if not same:
            return found
        because = f"the reference is the same run with seeds {same}, so that they are no independent pairs"
        return {
            key: verdict if verdict.claim == "undecided" else replace(verdict, claim="undecided", because=because)
            for key, verdict in found.items()
        }

    def _hypotheses(self, labels: Sequence[str]) -> dict[tuple[str, str], Hypothesis]:
        found: dict[tuple[str, str], Hypothesis] = {}
        for label in labels:
            for name, way in self._directions.items():
                if name in self._plan.margins and way is not None:
                    difference, num_failed = self._difference(name, label)
                    found[label, name] = Hypothesis(difference, way, self._plan.margins[name].value, num_failed)
        return found

    def _difference(self, name: str, label: str) -> tuple[Difference, int]:
        """Return the differences paired by seed, and how many pairs are lost: the arm failed, or did not log it."""
        theirs, ours = self._finals(name, self._plan.reference), self._finals(name, label)
        lost = sum(run.seed in theirs and run.seed not in ours for run in self._of[label])
        return Difference.of((ours[seed], theirs[seed]) for seed in theirs if seed in ours), lost

    def _finals(self, name: str, label: str) -> dict[int, float]:
        """Return the value of the last validation, by seed.

        It is NaN where the last validation did not log the metric, and that of the reference did: a module that leaves
        out what is not finite must not be judged by what it logged before.
        """
        always = {run.seed for run in _logged(self._reference, name) if _is_last(run, name)}
        return {
            run.seed: run.curves[name][-1].value if _is_last(run, name) or run.seed not in always else math.nan
            for run in _logged(self._of[label], name)
        }

    def _metric(self, name: str, label: str, judged: _Judged) -> ArmMetric:
        plan, way, is_reference = self._plan, self._directions[name], label == self._plan.reference
        logged = {run.seed: run for run in _logged(self._of[label], name)}
        targets = self._finals(name, plan.reference)
        margin = plan.margins[name].value if name in plan.margins else None
        allowed = (margin or 0.0) * (1 if way == "min" else -1)
        because = "it is what the others are compared with" if is_reference else ""
        return ArmMetric(
            name=name,
            direction=way,
            finals=self._finals(name, label),
            bests={} if way is None else {seed: best(run.curves[name], way) for seed, run in logged.items()},
            difference=None if is_reference else self._difference(name, label)[0],
            margin=margin,
            verdict=judged.get((label, name), Verdict("no margin", because=because)),
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
            num_hypotheses=max(1, sum(key[0] in self._compared for key in judged)),
        )

    # -- speeds --------------------------------------------------------------------------------------------------------

    def _speed(self, label: str) -> SpeedComparison | None:
        """Compare an arm's speed with the reference's, by what the control says about the machine.

        The control computes the same as the reference. If it is clearly faster or slower, the machine was busy with one
        of them, and may have been with any other arm: every interval is widened by that factor.
        """
        if label == self._plan.reference:
            return None
        found = self._paired_speed(label)
        if found is None or label == CONTROL or not self._plan.control:
            return found
        control = self._paired_speed(CONTROL)
        return found.widened(control.ratio) if control is not None and control.differs else found

    def _paired_speed(self, label: str) -> SpeedComparison | None:
        theirs = {run.seed: run.seconds_of_steps() for run in self._reference if run.finished}
        log_ratios: list[float] = []
        for run in self._of[label]:
            times, reference_times = run.seconds_of_steps(), theirs.get(run.seed, {})
            both = sorted(times.keys() & reference_times.keys())
            if run.finished and len(both) >= _LEAST_STEPS:
                log_ratios.append(paired_log_ratio([times[i] for i in both], [reference_times[i] for i in both]))
        return SpeedComparison.of(log_ratios) if log_ratios else None


def direction(plan: Plan, name: str, runs: Iterable[ArmRun]) -> Direction | None:
    """Return which way a metric is better: what torchmetrics says, what the user says, or what its name says."""
    known: Direction | None = next((run.directions[name] for run in runs if name in run.directions), None)
    given = plan.margins[name].direction if name in plan.margins else None
    return known or given or direction_of(name)


def _logged(runs: Iterable[ArmRun], name: str) -> list[ArmRun]:
    return [run for run in runs if run.finished and run.curves.get(name)]


def _is_last(run: ArmRun, name: str) -> bool:
    return run.curves[name][-1].step >= run.last_validation


def _minus(amp: float, fp32: float) -> float:
    return 0.0 if amp == fp32 else amp - fp32  # infinities, too


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
