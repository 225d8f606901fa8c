"""One arm of a comparison, summed up over its seeds: what a person reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from typing_extensions import final

from lightning_amp.findings import before_fallback
from lightning_amp.measure import SpeedComparison
from lightning_amp.verdicts._arm_run import ArmRun, Point
from lightning_amp.verdicts._statistics import Difference, Direction, Quartiles


@final
@dataclass(frozen=True)
class ArmMetric:
    """One validation metric of one arm; mappings are by seed and know the seeds that finished.

    Attributes:
        name: As the module logs it.
        direction: `"min"`, `"max"`, or `None` if nobody knows which is better.
        finals: Value of the last validation.
        bests: The best value; empty without a direction.
        difference: Final values minus those of the reference, paired by seed; `None` for the reference itself.
        margin: What it may cost; `None` without one.
        verdict: Begins with `"not worse"`, `"worse"`, `"undecided"` or `"no margin"`.
        evaluation_diff: Of the same weights: the last value minus that in fp32, which is what rounding in the
            evaluation costs.
        time_to_quality_s: Seconds of training until it was as good as the reference in the end, with the same seed and
            within the margin, if there is one; infinite if it never was. Empty without a direction.
        num_hypotheses: How many metrics and arms were judged together.

    """

    name: str
    direction: Direction | None
    finals: Mapping[int, float]
    bests: Mapping[int, float]
    difference: Difference | None
    margin: float | None
    verdict: str
    evaluation_diff: Mapping[int, float]
    time_to_quality_s: Mapping[int, float]
    num_hypotheses: int = 1

    @property
    def final(self) -> float:
        """Return the mean of the final values; NaN if no run finished."""
        return mean(self.finals.values())

    @property
    def best(self) -> float:
        """Return the mean of the best values; NaN without a direction."""
        return mean(self.bests.values())

    @property
    def highest_cost(self) -> float | None:
        """Return a bound of what the arm costs in this metric; positive is worse.

        It holds for all metrics and arms together with 95 %, after Bonferroni: with a smaller margin Holm's correction
        may find the arm undecided.

        """
        if self.difference is None or self.direction is None:
            return None
        low, high = self.difference.bounds(0.05 / self.num_hypotheses)
        return None if low is None or high is None else high if self.direction == "min" else -low


@final
@dataclass(frozen=True)
class Arm:
    """One arm of a :class:`PrecisionReport`.

    Attributes:
        label: Its name in the report.
        description: The plugin that it ran with.
        is_reference: Whether the others are compared with it.
        is_control: Whether it is the reference with initial weights moved in their last bit.
        runs: What each seed left, in the order of the seeds.
        metrics: By name.
        speed: How many times as fast as the reference it trains, paired by seed and step, with a 95 % interval over
            seeds; `None` for the reference, and if fewer than 10 steady steps could be paired.

    """

    label: str
    description: str
    is_reference: bool
    is_control: bool
    runs: tuple[ArmRun, ...]
    metrics: Mapping[str, ArmMetric]
    speed: SpeedComparison | None

    @property
    def errors(self) -> dict[int, str]:
        """Return what ended the runs that failed, by seed."""
        return {run.seed: run.error for run in self.runs if run.error is not None}

    @property
    def finished(self) -> list[ArmRun]:
        """Return the runs that trained to their end."""
        return [run for run in self.runs if run.finished]

    @property
    def step_s(self) -> Quartiles | None:
        """Return seconds per training step, of the steady steps of all seeds; `None` if there were too few."""
        return _quartiles(time for run in self.finished for time in run.step_s)

    @property
    def samples_per_s(self) -> Quartiles | None:
        """Return samples per second; `None` if the size of a batch is unknown."""
        return _quartiles(speed for run in self.finished for speed in run.samples_per_s)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Return the most that training held at once, of all seeds."""
        return max((run.peak_memory_bytes for run in self.finished if run.peak_memory_bytes is not None), default=None)

    @property
    def memory_of(self) -> str | None:
        """Return whose memory that is: `"device"` or `"tensors"`."""
        return next((run.memory_of for run in self.finished if run.memory_of is not None), None)

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps were applied with all seeds together."""
        return sum(run.num_steps for run in self.runs)

    @property
    def num_skipped(self) -> int:
        """Return how many optimizer steps were skipped with all seeds together."""
        return sum(run.num_skipped for run in self.runs)

    @property
    def final_scales(self) -> list[float]:
        """Return the loss scale at the end of each run, or of its part with one; empty without loss scaling."""
        scaled = [run for run in self.finished if run.scale and run.scale[0].precision in ("", "fp16")]
        return [before_fallback(run.scale)[-1].next_scale for run in scaled]

    @property
    def matmul_flops(self) -> dict[str, float]:
        """Return the share of the FLOPs of matrix products by dtype, from 0 to 1; empty if it could not be counted."""
        shares = Counter[str]()
        counted = [run.matmul_flops for run in self.finished if run.matmul_flops]
        for run in counted:
            shares.update({name: share / len(counted) for name, share in run.items()})
        return dict(shares.most_common())


def _quartiles(values: Iterable[float]) -> Quartiles | None:
    found = [value for value in values if 0 < value < math.inf]
    return Quartiles.of(found) if found else None


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    found = list(values)
    return fmean(found) if found else math.nan


def best(points: Sequence[Point], direction: Direction) -> float:
    """Return the best value of a curve; NaN only if there is nothing else."""
    values = [point.value for point in points if not math.isnan(point.value)]
    return (min if direction == "min" else max)(values, default=math.nan)


def time_to(points: Sequence[Point], target: float, direction: Direction) -> float:
    """Return the seconds of training until a curve was as good as `target`; infinite if it never was."""
    good = (p.train_s for p in points if (p.value <= target if direction == "min" else p.value >= target))
    return next(good, math.inf)
