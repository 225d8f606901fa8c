"""Test on paired runs whether an arm is worse than the reference by more than its margin.

Runs are paired by seed. Each claim is a test of the mean difference against the margin. Several claims at once are
corrected for their number. This file imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Literal, NamedTuple

from typing_extensions import final

from lightning_amp._text import counted, rounded

Direction = Literal["min", "max"]
"""Whether small values of a metric are better (a loss), or large values (an accuracy)."""

ALPHA = 0.05
"""Probability of a false claim, for all metrics and arms together."""

LEAST_PAIRS = 3
"""With fewer pairs there is no decision, because two values give no useful estimate of the spread."""

_POWER = 0.8
_SAME = 1e-6  # relative tolerance, because metrics are float32, in which 0.91 - 0.90 is not exactly the margin of 0.01

# -- paired differences ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Difference:
    """The difference between an arm and the reference, over paired runs.

    Attributes:
        values: Arm minus reference, one per pair, in the metric's unit. The order does not matter.
        num_reference_not_finite: Number of pairs in which the reference itself is infinite or NaN.

    """

    values: tuple[float, ...]
    num_reference_not_finite: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Difference:
        """Return the differences of pairs (arm, reference)."""
        pairs = list(pairs)
        not_finite = sum(not math.isfinite(reference) for _, reference in pairs)
        return cls(tuple(arm - reference for arm, reference in pairs), not_finite)

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
        """Return the standard deviation (n - 1 in the denominator); `None` with fewer than two pairs."""
        mean = self.mean
        if mean is None or len(self.values) < 2:
            return None
        if not math.isfinite(mean):
            return math.nan
        # `hypot` neither over- nor underflows where the squares would, and the order of its arguments does not matter.
        return math.hypot(*(value - mean for value in self.values)) / math.sqrt(len(self.values) - 1)

    def bounds(self, alpha: float = ALPHA) -> tuple[float, float] | None:
        """Return two one-sided bounds of the mean, each wrong with probability `alpha`; `None` without two pairs.

        mean -+ t(1 - alpha, n - 1) sd / sqrt(n), after Student (1908). Together they are the confidence interval of
        level 1 - 2 alpha. Equal values have no spread, and both bounds are their mean. Bounds of values that are not
        finite are NaN.

        Raises:
            ModuleNotFoundError: Without scipy.

        """
        mean, sd, count = self.mean, self.sd, len(self.values)
        if mean is None or sd is None:
            return None
        if not sd > 0:
            return (mean, mean) if sd == 0 else (math.nan, math.nan)
        reach = float(scipy_special().stdtrit(count - 1, 1 - alpha)) * sd / math.sqrt(count)
        return mean - reach, mean + reach

    def __neg__(self) -> Difference:
        return Difference(tuple(-value for value in self.values), self.num_reference_not_finite)


@final
@dataclass(frozen=True)
class Hypothesis:
    """The hypothesis about one metric of one arm: the arm costs less than the margin, or more.

    Attributes:
        difference: Arm minus reference, over the pairs in which both finished.
        direction: Whether the metric is better when it is smaller ("min") or larger ("max").
        margin: The cost that the arm may have, in the metric's unit.
        num_failed: How many pairs were lost because the arm failed where the reference finished.

    """

    difference: Difference
    direction: Direction
    margin: float
    num_failed: int = 0

    @property
    def cost(self) -> Difference:
        """Return the difference, with its sign turned so that positive is worse."""
        return self.difference if self.direction == "min" else -self.difference

    @property
    def obstacle(self) -> str | None:
        """Return the reason why these pairs cannot decide anything, whatever their values; `None` if they can."""
        count, not_finite = len(self.difference.values), self.difference.num_not_finite
        reference_not_finite = self.difference.num_reference_not_finite
        if self.num_failed and not count:
            return f"it failed with {'the only seed' if self.num_failed == 1 else f'all {self.num_failed} seeds'}"
        if self.num_failed:
            failed = _part(self.num_failed, self.num_failed + count)
            return f"it failed with {failed}, and judging only the surviving seeds would bias the result"
        if not count:
            return "there is no pair of runs"
        if reference_not_finite:
            return f"the reference itself is not finite with {_part(reference_not_finite, count)}"
        if not_finite and (not_finite < count or count < LEAST_PAIRS):
            return f"not finite with {_part(not_finite, count)}"
        if count < LEAST_PAIRS:
            few = "one seed never decides" if count == 1 else "two seeds never decide"
            cost, margin = rounded(self.cost.mean or 0.0), rounded(self.margin)
            return f"{few}, it takes at least three; mean cost {cost}, margin {margin}"
        return None


# -- tests -------------------------------------------------------------------------------------------------------------


@final
class PValues(NamedTuple):
    """The probabilities of mean costs at least this low, and at least this high, if the true cost equals the margin."""

    not_worse: float
    worse: float


def p_values(hypothesis: Hypothesis) -> PValues:
    """Test both claims with one-sided paired t-tests against the margin.

    "Not worse" rejects H0: mean cost >= margin, if t = (mean - margin) sqrt(n) / sd is small enough among Student's t
    with n - 1 degrees of freedom. "Worse" rejects H0: mean cost <= margin, if t is large enough. The first is the test
    of non-inferiority: Schuirmann (1987), one side of two; FDA, Non-Inferiority Clinical Trials (2016). It rejects
    exactly if the one-sided confidence bound of the cost is below the margin.

    Without spread, the mean is compared with the margin. If nothing can be shown, both p-values are 1.

    Raises:
        ModuleNotFoundError: Without scipy.

    """
    cost, margin = hypothesis.cost, hypothesis.margin
    mean, sd = cost.mean, cost.sd
    if hypothesis.obstacle is not None or mean is None or sd is None or sd == math.inf:
        return PValues(1.0, 1.0)
    if cost.num_not_finite:
        return PValues(1.0, 0.0)
    if sd == 0:
        within = mean <= margin or math.isclose(mean, margin, rel_tol=_SAME)
        return PValues(0.0, 1.0) if within else PValues(1.0, 0.0)
    t, freedom = (mean - margin) / sd * math.sqrt(len(cost.values)), len(cost.values) - 1
    special = scipy_special()
    return PValues(float(special.stdtr(freedom, t)), float(special.stdtr(freedom, -t)))


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


def seeds_needed(sd: float, distance: float, num_hypotheses: int = 1) -> float:
    """Return about how many pairs detect a given distance from the margin in four of five cases.

    Infinite if no number of pairs does. n = ((z(1 - alpha / K) + z(0.8)) sd / distance)^2, rounded up, at least three.
    That is the sample size of a one-sided paired test with a power of 0.8, in the normal approximation. Bonferroni's K
    is the worst case of Holm's correction. Chow, Shao and Wang, Sample Size Calculations in Clinical Research (2008),
    chapter 3. The exact t-test needs one or two pairs more.

    Raises:
        ModuleNotFoundError: Without scipy.

    """
    ndtri = scipy_special().ndtri
    ratio = (float(ndtri(_POWER)) - float(ndtri(ALPHA / num_hypotheses))) * sd / distance if distance > 0 else math.inf
    return max(LEAST_PAIRS, math.ceil(ratio * ratio)) if math.isfinite(ratio * ratio) else math.inf


def _part(count: int, of: int) -> str:
    return f"{count} of {counted(of, 'seed')}"


def scipy_special() -> ModuleType:
    """Return `scipy.special`, which is optional. Call this before work that would be lost without scipy.

    Raises:
        ModuleNotFoundError: Without scipy.

    """
    try:
        from scipy import special
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Verdicts and bounds need scipy, which is not installed. Run `pip install scipy`."
        ) from error
    return special
