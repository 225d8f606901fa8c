"""Sum up the runs of a comparison: arms, metrics, differences, verdicts, speeds and a recommendation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from typing_extensions import final

from lightning_amp.compare._arm import Arm, ArmMetric, best, time_to
from lightning_amp.compare._company import same_kind_of_device, shared_a_device
from lightning_amp.compare._directions import direction_of
from lightning_amp.compare._plan import CONTROL, Plan
from lightning_amp.compare._recommendation import Recommendation, recommend
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._statistics import Difference, Direction, Hypothesis
from lightning_amp.compare._verdict import Verdict, verdicts
from lightning_amp.measure import SpeedComparison, paired_log_ratio

_LEAST_STEPS = 10
"""The least number of steady steps that two runs must have in common before their speeds are compared."""

_Verdicts = Mapping[tuple[str, str], Verdict]
"""Verdicts by arm and metric, for the metrics with a margin."""


@final
@dataclass(frozen=True)
class Judgement:
    """The conclusions of a comparison, which texts, pages and charts show."""

    plan: Plan
    arms: Mapping[str, Arm]
    recommendation: Recommendation


def judge(plan: Plan, runs: Sequence[ArmRun], speed_runs: Sequence[ArmRun] = ()) -> Judgement:
    """Sum up the runs by arm, judge each arm in each metric, and recommend one."""
    arms = MappingProxyType(_Judge(plan, runs, speed_runs).arms())
    return Judgement(plan, arms, recommend(arms))


@final
class _Judge:
    """Compares the runs of each arm with the runs of the reference."""

    def __init__(self, plan: Plan, runs: Sequence[ArmRun], speed_runs: Sequence[ArmRun]) -> None:
        self._plan = plan
        timed = speed_runs if plan.measure_speed == "alone" else runs
        self._timed = {label: tuple(run for run in timed if run.label == label) for label in plan.labels}
        everything = (*runs, *speed_runs)
        self._crowded = {id(run) for run in timed if shared_a_device(run, everything)}
        self._of = {label: [run for run in runs if run.label == label] for label in plan.labels}
        self._reference = self._of[plan.reference]
        names = dict.fromkeys(name for run in runs for name in run.curves)
        self._directions: dict[str, Direction | None] = {name: direction(plan, name, runs) for name in names}
        self._compared = [label for label in plan.arms if label != plan.reference]

    def arms(self) -> dict[str, Arm]:
        """Return the arms by label, in order."""
        plan, judged = self._plan, self._verdicts()
        arms: dict[str, Arm] = {}
        for label, runs in self._of.items():
            is_control = label == CONTROL
            moved = f"{plan.arms[plan.reference]}, initial weights moved in their last bit"
            arms[label] = Arm(
                label=label,
                description=moved if is_control else plan.arms[label],
                is_reference=label == plan.reference,
                is_control=is_control,
                runs=tuple(runs),
                metrics={
                    name: self._metric(name, label, judged)
                    for name in self._directions
                    if (label, name) in judged or any(name in run.curves for run in runs)
                },
                speed=self._speed(label),
                not_compared=self._why_not_compared(label),
                speed_runs=self._timed[label] if plan.measure_speed == "alone" else (),
            )
        return arms

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def _verdicts(self) -> _Verdicts:
        """Judge all arms together in all metrics with a margin.

        The control is judged separately, because it is not a candidate.
        """
        found = verdicts(self._hypotheses(self._compared))
        if self._plan.control:
            found |= verdicts(self._hypotheses([CONTROL]))
        same = _seeds_of_one_run(self._reference)
        if not same:
            return found
        because = f"the reference is the same run with seeds {same}, so that they are not independent pairs"
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

        It is NaN if the arm's last validation did not log the metric, but the reference's did. Otherwise a module that
        does not log values that are not finite would be judged by an earlier validation.
        """
        always = {run.seed for run in _logged(self._reference, name) if _is_last(run, name)}
        return {
            run.seed: run.curves[name][-1].value if _is_last(run, name) or run.seed not in always else math.nan
            for run in _logged(self._of[label], name)
        }

    def _metric(self, name: str, label: str, judged: _Verdicts) -> ArmMetric:
        plan, way, is_reference = self._plan, self._directions[name], label == self._plan.reference
        logged = {run.seed: run for run in _logged(self._of[label], name)}
        margin = plan.margins[name].value if name in plan.margins else None
        bests: dict[int, float] = {}
        times: dict[int, float] = {}
        if way is not None:
            bests = {seed: best(run.curves[name], way) for seed, run in logged.items()}
            targets = self._finals(name, plan.reference)
            allowed = (margin or 0.0) * (1 if way == "min" else -1)
            times = {
                seed: time_to(run.curves[name], targets[seed] + allowed, way)
                for seed, run in logged.items()
                if not math.isnan(targets.get(seed, math.nan))
            }
        because = "all other arms are compared with it" if is_reference else ""
        return ArmMetric(
            name=name,
            direction=way,
            finals=self._finals(name, label),
            bests=bests,
            difference=None if is_reference else self._difference(name, label)[0],
            margin=margin,
            verdict=judged.get((label, name), Verdict("no margin", because=because)),
            evaluation_diff={
                seed: _minus(*run.same_weights[name]) for seed, run in logged.items() if name in run.same_weights
            },
            time_to_quality_s=times,
            num_hypotheses=max(1, sum(key[0] in self._compared for key in judged)),
        )

    # -- speeds --------------------------------------------------------------------------------------------------------

    def _speed(self, label: str) -> SpeedComparison | None:
        """Compare an arm's speed with the reference's, and widen the interval if the machine was busy.

        The control computes the same as the reference. If it is clearly faster or slower, the machine was busy during
        one of them, and perhaps during any other arm. So every interval is widened by the control's ratio.
        """
        if label == self._plan.reference:
            return None
        found = self._paired_speed(label)
        if found is None or label == CONTROL or not self._plan.control:
            return found
        control = self._paired_speed(CONTROL)
        return found.widened(control.ratio) if control is not None and control.differs else found

    def _pairs(self, label: str) -> list[tuple[ArmRun, ArmRun]]:
        """Return each finished run of an arm with the reference's run of the same seed."""
        theirs = {run.seed: run for run in self._timed[self._plan.reference] if run.finished}
        return [(run, theirs[run.seed]) for run in self._timed[label] if run.finished and run.seed in theirs]

    def _paired_speed(self, label: str) -> SpeedComparison | None:
        """Compare the times of the runs that had a device of the same model for themselves."""
        log_ratios: list[float] = []
        for run, reference in self._pairs(label) if self._plan.measure_speed != "off" else ():
            if id(run) in self._crowded or id(reference) in self._crowded or not same_kind_of_device(run, reference):
                continue
            times, reference_times = run.seconds_of_steps(), reference.seconds_of_steps()
            both = sorted(times.keys() & reference_times.keys())
            if len(both) >= _LEAST_STEPS:
                log_ratios.append(paired_log_ratio([times[i] for i in both], [reference_times[i] for i in both]))
        return SpeedComparison.of(log_ratios) if log_ratios else None

    def _why_not_compared(self, label: str) -> str:
        """Return why an arm has no speed; empty if it has one, or needs none."""
        pairs = self._pairs(label)
        if label == self._plan.reference or self._paired_speed(label) is not None:
            return ""
        if not pairs:
            is_short = self._plan.measure_speed == "alone"
            return "the short runs that measure it failed or are missing" if is_short else ""
        if self._plan.measure_speed == "off":
            return "`measure_speed=False`"
        if any(id(run) in self._crowded for pair in pairs for run in pair):
            return "runs shared a device"
        if not any(same_kind_of_device(*pair) for pair in pairs):
            return "the runs had different devices"
        return f"fewer than {_LEAST_STEPS} steady steps"


def direction(plan: Plan, name: str, runs: Iterable[ArmRun]) -> Direction | None:
    """Return the better direction of a metric: by torchmetrics, else by the user, else by the metric's name."""
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
    """Name two seeds with equal losses and metrics. They show that nothing in the run depends on the seed."""
    seen: dict[object, int] = {}
    for run in reference:
        if run.finished and run.loss:
            values = tuple((name, tuple(p.value for p in points)) for name, points in run.curves.items())
            key = (values, tuple(p.value for p in run.loss))
            if key in seen:
                return f"{seen[key]} and {run.seed}"
            seen[key] = run.seed
    return ""
