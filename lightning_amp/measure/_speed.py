"""`SpeedComparison`: the statistic behind every sentence about speed; `in_rounds` times runs for it.

It has a ratio of times, its interval, and a claim. A repetition is a whole run (one seed of a comparison) or a whole
round in which each contestant runs once. It is never a single step. All steps of one process share a memory layout, a
clock rate and other load on the machine. So thousands of steps repeat one measurement. This file needs no torch, no
Lightning and no scipy.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Literal

from typing_extensions import final

SpeedClaim = Literal["faster", "slower", "same", "undecided", "one run"]

SAME_WITHIN = 1.05
"""A run is "as fast within 5 %" as its reference if the whole interval of the ratio lies between 1 / 1.05 and 1.05."""

_WIDEST = 100.0
"""An interval whose ends differ by a larger factor is too wide to be useful, and is not printed."""


@final
@dataclass(frozen=True)
class SpeedComparison:
    """How many times as fast one run, the contestant, is as its reference, and the claim that this supports.

    If both run the same thing, "faster" or "slower" is claimed with probability `1 - level` at most, for any number of
    independent repetitions. `tests/unit/measure/test_speed.py` simulates this.

    Attributes:
        ratio: Time of the reference over time of the contestant, as the geometric mean over the repetitions: 2.0 is
            twice as fast.
        low: Lower end of the confidence interval of `ratio`; `None` with one repetition, which has no interval.
        high: Upper end of that interval.
        num_repetitions: Number of seeds or rounds.

    """

    ratio: float
    low: float | None
    high: float | None
    num_repetitions: int

    @classmethod
    def of(cls, log_ratios: Iterable[float], level: float = 0.95) -> SpeedComparison:
        """Compare by Student's t interval of the mean of log(time of the contestant / time of the reference).

        There must be one or more values, all of them finite.
        """
        values = list(log_ratios)
        mean, count = statistics.fmean(values), len(values)
        if count == 1:
            return cls(math.exp(-mean), None, None, 1)
        reach = t_quantile(0.5 + level / 2, count - 1) * statistics.stdev(values) / math.sqrt(count)
        return cls(math.exp(-mean), _exp(-mean - reach), _exp(-mean + reach), count)

    @classmethod
    def of_rounds(
        cls, contestant_s: Iterable[float], reference_s: Iterable[float], level: float = 0.95
    ) -> SpeedComparison | None:
        """Compare two series of seconds, paired by round.

        `None` if there is no round in which both took a measurable time.
        """
        pairs = [(a, b) for a, b in zip(contestant_s, reference_s, strict=False) if a > 0 and b > 0]
        return cls.of([math.log(a / b) for a, b in pairs], level) if pairs else None

    @property
    def claim(self) -> SpeedClaim:
        """Return the claim that the interval supports."""
        if self.low is None or self.high is None:
            return "one run"
        if self.low >= 1 / SAME_WITHIN and self.high <= SAME_WITHIN:
            return "same"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "undecided"

    @property
    def decided_ratio(self) -> float | None:
        """Return the ratio to decide by: `ratio`, 1.0 if both are as fast within 5 %, `None` if undecided."""
        if self.claim in ("undecided", "one run"):
            return None
        return 1.0 if self.claim == "same" else self.ratio

    def to_data(self) -> dict[str, object]:
        """Return the fields and the claim as plain data for JSON."""
        return {"claim": self.claim, **asdict(self)}

    def widened(self, control: SpeedComparison) -> SpeedComparison:
        """Widen the interval by the end of the control's interval that is further from 1."""
        if self.low is None or self.high is None:
            return self
        ends = (control.ratio, control.low or control.ratio, control.high or control.ratio)
        factor = max(*ends, *(1 / end for end in ends))
        return replace(self, low=self.low / factor, high=self.high * factor)

    @property
    def interval(self) -> str:
        """Write the interval: `0.60x to 1.10x`; empty if there is none, or if it is too wide to say anything."""
        if self.low is None or self.high is None or self.high > _WIDEST * self.low:
            return ""
        return f"{_short(self.low)}x to {_short(self.high)}x"

    def in_words(self, reference: str = "") -> str:
        """Write the claim: `1.3x as fast (1.2 to 1.4)`, `as fast within 5 %`, `speed undecided: 0.60x to 1.10x`.

        With the name of a reference: `1.3x as fast as fp32 (1.2 to 1.4)`.
        """
        as_reference = f" as {reference}" if reference else ""
        if self.claim == "one run":
            return f"{times_as_fast(self.ratio, reference=reference)}, one run of each"
        if self.claim == "same":
            return f"as fast{as_reference} within {100 * (SAME_WITHIN - 1):.0f} %"
        if self.claim == "undecided":
            return f"speed undecided: {self.interval}" if self.interval else "speed undecided"
        return times_as_fast(self.ratio, self.low, self.high, reference)

    def __str__(self) -> str:
        return self.in_words()


def in_rounds(
    runs: Mapping[str, Callable[[], float]],
    takes_part: Callable[[int], Iterable[str]],
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each run by round; each round reverses the order of the round before.

    A machine that becomes busy then slows down all runs, and not only the last one.

    Each run is called once before the first round, so that kernels are chosen and memory is allocated. The seconds of
    that call are not returned.

    Args:
        runs: Functions that return the seconds of one run.
        takes_part: Returns the names for the next round, given the number of finished rounds. An empty result ends the
            timing.
        failed: Called with the name and the exception if a first call raises; that run is then left out. Without
            `failed` the exception is raised.

    """
    seconds: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            run()
        except Exception as error:
            if failed is None:
                raise
            failed(name, error)
        else:
            seconds[name] = []
    for number in itertools.count():
        names = [name for name in takes_part(number) if name in seconds]
        if not names:
            break
        for name in names if number % 2 else names[::-1]:
            seconds[name].append(runs[name]())
    return seconds


def paired_log_ratio(contestant_s: Sequence[float], reference_s: Sequence[float]) -> float:
    """Return the median of log(time of the contestant / time of the reference) over steps that did the same work.

    Pairing step k of one run with step k of the other cancels differences between batches.

    Raises:
        ValueError: If the lengths differ, there is no step, or a time is not positive.

    """
    return statistics.median(math.log(a / b) for a, b in zip(contestant_s, reference_s, strict=True))


def times_as_fast(ratio: float, low: float | None = None, high: float | None = None, reference: str = "") -> str:
    """Write a ratio of speeds and its interval: `1.3x as fast (1.2 to 1.4)`, `1.5x as slow as fp32 (1.3 to 1.7)`."""
    slow = ratio < 1
    ends = sorted(1 / end if slow else end for end in (low, high) if end is not None)
    values = [1 / ratio if slow else ratio, *ends]
    middle, *interval = _written(values)
    what = f"{middle}x as {'slow' if slow else 'fast'}" + (f" as {reference}" if reference else "")
    return f"{what} ({' to '.join(interval)})" if interval else what


def _written(factors: list[float]) -> list[str]:
    """Write factors above 1 with enough decimals to distinguish them from 1 and from each other."""
    least, spread = min(factors), max(factors) - min(factors)
    one_is_enough = round(least, 1) > 1 and (len(factors) == 1 or spread >= 0.1)
    digits = 1 if one_is_enough else 2 if least >= 1.005 else 3
    return [f"{factor:,.0f}" if factor >= 100 else f"{factor:.{digits}f}" for factor in factors]


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t with a whole number of degrees of freedom, for a probability above 0.5.

    It inverts the finite sums of Abramowitz and Stegun (1964), 26.7.3 and 26.7.4, by bisection. `auto` and the doctor
    need it, and scipy is an optional dependency.
    """
    low, high = 0.0, math.pi / 2  # bounds of the angle in t = sqrt(freedom) tan(angle)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 + _t_within(middle, freedom)) / 2 < probability else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _t_within(angle: float, freedom: int) -> float:
    """Return the probability that |t| < sqrt(freedom) tan(angle)."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):  # cos + 2/3 cos^3 + ..., or 1 + 1/2 cos^2 + ...
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(700.0, value)))


def _short(value: float) -> str:
    return f"{value:.2f}" if 0.095 <= value < 9.995 else f"{value:.2g}"
