"""One arm of a comparison, summed up over its seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import NamedTuple

from typing_extensions import final

from lightning_amp.compare._run import Run
from lightning_amp.compare._stats import Difference, Direction, Verdict
from lightning_amp.measure import MemoryOf, SpeedComparison


@final
class Quartiles(NamedTuple):
    """The quartiles and the median of some positive values."""

    q25: float
    median: float
    q75: float


@final
@dataclass(frozen=True)
class ArmMetric:
    """One validation metric of one arm. Mappings are by seed, and hold the seeds that finished.

    Attributes:
        name: The name under which the module logs the metric.
        direction: `"min"`, `"max"`, or `None` if the better direction is unknown.
        finals: The value of the last validation.
        bests: The best value; empty without a direction.
        difference: Final values minus the final values of the reference, paired by seed; `None` for the reference.
        margin: The cost that the arm may have; `None` without a margin.
        verdict: Whether the arm is worse, and why; `str` writes it as a sentence.
        evaluation_diff: Last value minus the value of the same weights in fp32: the effect of rounding in evaluation.
        time_to_quality_s: Seconds of training until the arm reached the reference's final value with the same seed,
            within the margin if there is one; infinite if it never did. Empty without a direction.

    """

    name: str
    direction: Direction | None
    finals: Mapping[int, float]
    bests: Mapping[int, float]
    difference: Difference | None
    margin: float | None
    verdict: Verdict
    evaluation_diff: Mapping[int, float]
    time_to_quality_s: Mapping[int, float]

    @property
    def final(self) -> float:
        """Return the mean of the final values; NaN if no run finished."""
        return mean(self.finals.values())

    @property
    def best(self) -> float:
        """Return the mean of the best values; NaN without a direction."""
        return mean(self.bests.values())


@final
@dataclass(frozen=True)
class Arm:
    """One arm of a :class:`PrecisionReport`.

    Attributes:
        label: Its name in the report.
        description: The plugin that it ran with.
        is_reference: Whether this arm is the one with which all other arms are compared.
        is_control: Whether it is the control: the reference, with initial weights moved in their last bit.
        runs: The record of each run, in the order of the seeds. A run that left no record has an error that says so.
        metrics: By name.
        speed: How many times as fast as the reference it trains, paired by seed and step, with a 90 % interval over
            seeds. `None` for the reference, and if it was not compared.
        not_compared: Why the speed was not compared.

    """

    label: str
    description: str
    is_reference: bool
    is_control: bool
    runs: tuple[Run, ...]
    metrics: Mapping[str, ArmMetric]
    speed: SpeedComparison | None
    not_compared: str = ""

    @property
    def errors(self) -> dict[int, str]:
        """Return the errors of the runs that failed or left no record, by seed."""
        return {run.seed: run.error for run in self.runs if run.error is not None}

    @property
    def finished(self) -> list[Run]:
        """Return the runs that trained to their end."""
        return [run for run in self.runs if run.finished]

    @property
    def step_s(self) -> Quartiles | None:
        """Return seconds per training step, over the steady steps of all seeds; `None` if there were too few."""
        return _quartiles(time for run in self.finished for time in run.step_s)

    @property
    def samples_per_s(self) -> Quartiles | None:
        """Return samples per second; `None` if the batch size is unknown."""
        return _quartiles(speed for run in self.finished for speed in run.samples_per_s)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Return the most memory that training held at once, over all seeds."""
        return max((run.peak_memory_bytes for run in self.finished if run.peak_memory_bytes is not None), default=None)

    @property
    def memory_of(self) -> MemoryOf | None:
        """Return the source of that number: `"device"` or `"tensors"`."""
        return next((run.memory_of for run in self.finished if run.memory_of is not None), None)

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps were applied, over all seeds."""
        return sum(run.num_steps for run in self.runs)

    @property
    def num_skipped(self) -> int:
        """Return how many optimizer steps were skipped, over all seeds."""
        return sum(run.num_skipped for run in self.runs)

    @property
    def final_scales(self) -> list[float]:
        """Return the last loss scale of each run; empty without loss scaling."""
        return [run.scale[-1].next_scale for run in self.finished if run.scale]

    @property
    def matmul_flops(self) -> dict[str, float]:
        """Return each dtype's share in the FLOPs of matrix products, from 0 to 1; empty if they were not counted."""
        shares = Counter[str]()
        counted = [run.matmul_flops for run in self.finished if run.matmul_flops]
        for run in counted:
            shares.update({name: share / len(counted) for name, share in run.items()})
        return dict(shares.most_common())

    def judged(self, claim: str = "") -> list[ArmMetric]:
        """Return the metrics with a margin, or only the metrics whose verdict is the given claim."""
        judged = [metric for metric in self.metrics.values() if metric.margin is not None]
        return [metric for metric in judged if metric.verdict.claim == claim] if claim else judged

    @property
    def is_fine(self) -> bool:
        """Return whether it was shown to be not worse in every metric with a margin."""
        return bool(self.judged()) and not self.errors and self.judged() == self.judged("not worse")


def _quartiles(values: Iterable[float]) -> Quartiles | None:
    found = [value for value in values if 0 < value < math.inf]
    if not found:
        return None
    return Quartiles(*quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive"))


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN without values."""
    found = list(values)
    return fmean(found) if found else math.nan
