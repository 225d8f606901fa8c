"""Decide on paired runs whether an arm is worse than the reference by more than its margin.

Runs are paired by seed. Each claim is a test of the mean difference against the margin. Several claims at once are
corrected for their number. This file imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import Literal, TypeVar

from typing_extensions import final, override

from lightning_amp._text import counted, rounded
from lightning_amp.measure import SpeedComparison

Direction = Literal["min", "max"]
"""Whether small values of a metric are better (a loss), or large values (an accuracy)."""

Claim = Literal["not worse", "worse", "undecided", "no margin"]

ALPHA = 0.05
"""Probability of a false claim, for all metrics and arms together."""

INTERVAL = "90 % interval"
"""Every interval of a report: each of its ends is wrong with probability `ALPHA`."""

LEAST_PAIRS = 3
"""With fewer pairs there is no decision, because two values give no useful estimate of the spread."""

_POWER = 0.8
_SAME, _ON_GRID = 1e-6, 0.01
_MOST_SEEDS = 1000  # larger numbers are not practical, and are not printed

_Key = TypeVar("_Key", bound=Hashable)

# -- paired differences ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Difference:
    """The difference between an arm and the reference, over paired runs.

    Attributes:
        values: Arm minus reference, one per pair, in the metric's unit. The order does not matter.
        resolution: The smallest step of the metric, see :func:`resolution_of`; 0 if it never changed.
        num_lost: Number of seeds without a pair, because a run failed or left no record.
        num_reference_not_finite: Number of pairs in which the reference itself is infinite or NaN.

    """

    values: tuple[float, ...]
    resolution: float = 0.0
    num_lost: int = 0
    num_reference_not_finite: int = 0

    @property
    def num_not_finite(self) -> int:
        """Return how many of the values are infinite or NaN."""
        return sum(not math.isfinite(value) for value in self.values)

    @cached_property
    def mean(self) -> float | None:
        """Return the mean, correctly rounded; `None` without a pair."""
        return statistics.mean(map(float, self.values)) if self.values else None

    @cached_property
    def sd(self) -> float | None:
        """Return the standard deviation, at least the resolution; `None` with fewer than two pairs.

        Three equal accuracies of 359 rows do not show that the accuracy never differs. They only show that it seldom
        differs by more than one row.
        """
        mean = self.mean
        if mean is None or len(self.values) < 2:
            return None
        if not math.isfinite(mean):
            return math.nan
        # `hypot` neither over- nor underflows where the squares would, and the order of its arguments does not matter
        sd = math.hypot(*(value - mean for value in self.values)) / math.sqrt(len(self.values) - 1)
        return max(sd, self.resolution)

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        """Return the 90 % interval of the mean: two one-sided bounds of 95 %. `None` without two pairs.

        mean -+ t(0.95, n - 1) sd / sqrt(n), after Student (1908). Bounds of values that are not finite are NaN.

        Raises:
            ModuleNotFoundError: Without scipy.

        """
        mean, sd, count = self.mean, self.sd, len(self.values)
        if mean is None or sd is None:
            return None
        if not sd > 0:
            return (mean, mean) if sd == 0 else (math.nan, math.nan)
        reach = float(scipy_special().stdtrit(count - 1, 1 - ALPHA)) * sd / math.sqrt(count)
        return mean - reach, mean + reach

    def cost(self, direction: Direction) -> Difference:
        """Return the difference with its sign turned so that positive is worse."""
        return self if direction == "min" else replace(self, values=tuple(-value for value in self.values))

    def obstacle(self, margin: float) -> str:
        """Return the reason why these costs decide nothing, whatever their values; empty if they can decide."""
        count, lost = len(self.values), self.num_lost
        if lost or not count:
            biased = ", and judging only the other seeds would bias the result" if count else ""
            return f"a run failed or is missing with {_part(lost, lost + count)}{biased}"
        if self.num_reference_not_finite:
            return f"the reference itself is not finite with {_part(self.num_reference_not_finite, count)}"
        if self.num_not_finite and (self.num_not_finite < count or count < LEAST_PAIRS):
            return f"not finite with {_part(self.num_not_finite, count)}"
        if count < LEAST_PAIRS:
            return f"it takes at least three seeds; mean cost {rounded(self.mean or 0.0)}, margin {rounded(margin)}"
        if not self.num_not_finite and not self.resolution:
            return "the metric never changed, in any run, so equal values show nothing"
        return ""


def resolution_of(values: Iterable[float]) -> float:
    """Return the smallest distance between two values of a metric; 0 if it never changed.

    It is 1/359 for an accuracy on 359 rows, and tiny for a loss. Accuracies are averaged over batches in float32, so
    equal counts may differ in their last bit. Such a distance does not count if all others are multiples of one step.
    """
    found = sorted({value for value in values if math.isfinite(value)})
    steps = [b - a for a, b in pairwise(found) if not math.isclose(a, b, rel_tol=_SAME)]
    step = min(steps, default=0.0)
    if all(abs(other / step - round(other / step)) < _ON_GRID for other in steps):
        return step
    return min(b - a for a, b in pairwise(found))


def _part(count: int, of: int) -> str:
    return f"{count} of {counted(of, 'seed')}"


# -- verdicts ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Verdict:
    """Whether an arm is worse than the reference in one metric; `str` writes it as a sentence.

    Costs are in the metric's own unit; a positive cost is worse.

    Attributes:
        claim: `"not worse"`, `"worse"`, `"undecided"`, or `"no margin"` if no margin was given for the metric.
        cost: Mean cost over the pairs of runs; `None` if there is none.
        sd: Standard deviation of the cost over the pairs, at least the metric's resolution; `None` with fewer than two.
        bounds: The 90 % interval of the mean cost; `None` without a test.
        margin: The cost that the arm may have; `None` without a margin.
        num_pairs: Number of runs that could be compared with a run of the reference with the same seed.
        p_value: The p-value of the more likely claim, `"not worse"` or `"worse"`, by itself; `None` without a test.
        adjusted_p_value: The same after Holm's correction for all metrics and arms together; this one decides.
        num_comparisons: How many metrics and arms were judged together.
        seeds_needed: About how many seeds would decide an undecided verdict; `None` if it is decided, or if more seeds
            would not help.
        because: The reason why these runs decide nothing, or need no test; empty if the test decides.

    """

    claim: Claim
    cost: float | None = None
    sd: float | None = None
    bounds: tuple[float, float] | None = None
    margin: float | None = None
    num_pairs: int = 0
    p_value: float | None = None
    adjusted_p_value: float | None = None
    num_comparisons: int = 1
    seeds_needed: float | None = None
    because: str = ""

    @property
    def reason(self) -> str:
        """Write the numbers behind the claim; empty if there are none."""
        if self.because or self.cost is None or self.bounds is None or self.margin is None:
            return self.because
        mean, low, high, margin = (rounded(value) for value in (self.cost, *self.bounds, self.margin))
        text = f"mean cost {mean} ({INTERVAL}: {low} to {high}), margin {margin}, {self.num_pairs} pairs"
        if self.claim != "undecided":
            return text
        if (self.p_value or 0.0) <= ALPHA:
            text += f"; enough for one comparison, not for {self.num_comparisons} at once"
        if self.seeds_needed is None:
            return f"{text}; with a margin of 0 no number of seeds shows that an arm is not worse, unless it is better"
        return f"{text}; it takes {in_words(self.seeds_needed)} seeds"

    @override
    def __str__(self) -> str:
        reason = self.reason
        return f"{self.claim}: {reason}" if reason else self.claim


def verdicts(questions: Mapping[_Key, tuple[Difference, Direction, float]]) -> dict[_Key, Verdict]:
    """Decide for each difference, direction and margin: "not worse", "worse" or "undecided".

    Both claims are one-sided paired t-tests of the mean cost against the margin. The first is the test of
    non-inferiority: Schuirmann (1987), one side of two; FDA, Non-Inferiority Clinical Trials (2016). The claims "not
    worse" are one family and the claims "worse" another, each with one claim per question. A family contains a false
    claim with probability `ALPHA` at most, after Holm's correction. Questions that cannot be tested count too, because
    they would have been tested.

    Raises:
        ModuleNotFoundError: Without scipy.

    """
    costs = {key: (difference.cost(direction), margin) for key, (difference, direction, margin) in questions.items()}
    found = [_p_values(cost, margin) for cost, margin in costs.values()]
    families = [holm([p[side] for p in found]) for side in (0, 1)]
    return {
        key: _decide(cost, margin, p, (not_worse, worse), len(found))
        for (key, (cost, margin)), p, not_worse, worse in zip(costs.items(), found, *families, strict=True)
    }


def _p_values(cost: Difference, margin: float) -> tuple[float, float]:
    """Return the probabilities of mean costs this low, and this high, if the true cost equals the margin."""
    if cost.obstacle(margin) or cost.mean is None or cost.sd is None:
        return 1.0, 1.0
    if cost.num_not_finite:
        return 1.0, 0.0
    t, freedom = (cost.mean - margin) / cost.sd * math.sqrt(len(cost.values)), len(cost.values) - 1
    special = scipy_special()
    return float(special.stdtr(freedom, t)), float(special.stdtr(freedom, -t))


def _decide(
    cost: Difference, margin: float, alone: tuple[float, float], together: tuple[float, float], num_comparisons: int
) -> Verdict:
    count = len(cost.values)
    verdict = Verdict("undecided", cost.mean, cost.sd, margin=margin, num_pairs=count, because=cost.obstacle(margin))
    if verdict.because:
        return verdict
    if cost.num_not_finite:
        return replace(
            verdict, claim="worse", because=f"not finite with all {count} seeds, where the reference is finite"
        )
    side = int(alone[1] < alone[0])  # the two claims exclude each other
    is_decided = together[side] <= ALPHA
    return replace(
        verdict,
        claim=("not worse", "worse")[side] if is_decided else "undecided",
        bounds=cost.bounds,
        p_value=alone[side],
        adjusted_p_value=together[side],
        num_comparisons=num_comparisons,
        seeds_needed=None if is_decided or margin == 0 else _seeds_to_decide(cost, margin, num_comparisons),
    )


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values so that claiming all tests up to alpha makes a false claim with probability alpha at most.

    The k-th smallest of K is multiplied by K - k + 1, is at least as large as the one before, and at most 1. The tests
    may depend on each other. Holm, A Simple Sequentially Rejective Multiple Test Procedure (1979).
    """
    adjusted = [1.0] * len(values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        adjusted[index] = least = max(least, min(1.0, (len(values) - rank) * values[index]))
    return adjusted


# -- how many seeds ----------------------------------------------------------------------------------------------------


def _seeds_to_decide(cost: Difference, margin: float, num_comparisons: int) -> float:
    """Return how many seeds show "not worse" if the true cost is 0.

    If there are that many seeds already, return how many distinguish the measured cost from the margin.
    """
    mean, sd, count = cost.mean or 0.0, cost.sd or 0.0, len(cost.values)
    number = seeds_needed(sd, margin, num_comparisons)
    return number if number > count else max(count + 1, seeds_needed(sd, abs(margin - mean), num_comparisons))


def in_words(num_seeds: float) -> str:
    """Write how many seeds are needed: `about 12`, `more than 1,000`."""
    return f"more than {_MOST_SEEDS:,}" if num_seeds > _MOST_SEEDS else f"about {num_seeds}"


def seeds_for_speed(speed: SpeedComparison) -> float:
    """Return about how many seeds decide a speed that is undecided: faster, slower, or the same within 5 %."""
    if speed.low is None or speed.high is None:
        return LEAST_PAIRS
    count, log_ratio = speed.num_repetitions, abs(math.log(speed.ratio))
    reach = float(scipy_special().stdtrit(count - 1, 1 - ALPHA)) / math.sqrt(count)
    sd = math.log(speed.high / speed.low) / 2 / reach
    return max(count + 1, seeds_needed(sd, max(log_ratio, math.log(1.05) - log_ratio)))


def seeds_needed(sd: float, distance: float, num_comparisons: int = 1) -> float:
    """Return about how many pairs detect a given distance in four of five cases; infinite if no number does.

    n = ((z(1 - alpha / K) + z(0.8)) sd / distance)^2, rounded up, at least three. This is the sample size of a
    one-sided paired test with a power of 0.8, in the normal approximation. Bonferroni's K is the worst case of Holm's
    correction. Chow, Shao and Wang, Sample Size Calculations in Clinical Research (2008), chapter 3. The exact t-test
    needs one or two pairs more.

    Raises:
        ModuleNotFoundError: Without scipy.

    """
    ndtri = scipy_special().ndtri
    ratio = (float(ndtri(_POWER)) - float(ndtri(ALPHA / num_comparisons))) * sd / distance if distance > 0 else math.inf
    return max(LEAST_PAIRS, math.ceil(ratio * ratio)) if math.isfinite(ratio * ratio) else math.inf


def scipy_special() -> ModuleType:
    """Return `scipy.special`, which is optional. Call this before work that would be lost without scipy.

    Raises:
        ModuleNotFoundError: Without scipy.

    """
    try:
        from scipy import special
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Verdicts and intervals need scipy, which is not installed. Run `pip install scipy`."
        ) from error
    return special
