"""`Verdict`: whether an arm is worse than the reference in one metric.

It stores numbers, and writes its sentence on request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from typing_extensions import final, override

from lightning_amp._text import rounded
from lightning_amp.compare._statistics import ALPHA, Hypothesis, PValues, holm, p_values, seeds_needed

Claim = Literal["not worse", "worse", "undecided", "no margin"]

_MOST_SEEDS = 1000
"""Larger numbers of seeds are not printed, because they are not practical."""

_Key = TypeVar("_Key", bound=Hashable)


@final
@dataclass(frozen=True)
class Verdict:
    """Whether an arm is worse than the reference in one metric; `str` writes it as a sentence.

    Costs are in the metric's own unit; a positive cost is worse.

    Attributes:
        claim: `"not worse"`, `"worse"`, `"undecided"`, or `"no margin"` if no margin was given for the metric.
        cost: Mean cost over the pairs of runs; `None` if there is none.
        sd: Standard deviation of the cost over the pairs; `None` with fewer than two.
        bounds: Two one-sided bounds of the mean cost, each wrong with probability `alpha`; `None` without a test.
        margin: The cost that the arm may have; `None` without a margin.
        num_pairs: Number of runs that could be compared with a run of the reference with the same seed.
        p_value: The p-value of the more likely claim, `"not worse"` or `"worse"`, by itself; `None` without a test.
        adjusted_p_value: The same after Holm's correction for all metrics and arms together; this one decides.
        num_comparisons: How many metrics and arms were judged together.
        alpha: The probability of a false claim among them.
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
    alpha: float = ALPHA
    seeds_needed: float | None = None
    because: str = ""

    @property
    def reason(self) -> str:
        """Write the numbers behind the claim, without p-values; empty if there are none."""
        if self.because or self.cost is None or self.bounds is None or self.margin is None:
            return self.because
        mean, low, high, margin = (rounded(value) for value in (self.cost, *self.bounds, self.margin))
        if self.sd == 0:
            return f"cost {mean} in each of {self.num_pairs} pairs, margin {margin}"
        level = f"one-sided {100 * (1 - self.alpha):.3g} % bound"
        if self.claim != "undecided":
            bound = f"at most {high}" if self.claim == "not worse" else f"at least {low}"
            return f"mean cost {mean}, {bound} ({level}), margin {margin}, {self.num_pairs} pairs"
        takes = (
            "with a margin of 0 no number of seeds shows that an arm is not worse, unless it is equal or better"
            if self.seeds_needed is None
            else f"it takes {in_words(self.seeds_needed)} seeds"
        )
        if (self.p_value or 0.0) <= self.alpha:
            takes = f"enough for one comparison, not for {self.num_comparisons} at once; {takes}"
        return (
            f"mean cost {mean}, between {low} and {high} ({level}s), margin {margin}, {self.num_pairs} pairs; {takes}"
        )

    @property
    def details(self) -> str:
        """Write the p-values of the test; empty without a test."""
        if self.p_value is None or self.adjusted_p_value is None or self.sd == 0:
            return ""
        alone = f"p = {rounded(self.p_value)}"
        if self.num_comparisons == 1:
            return alone
        among = f"{rounded(self.adjusted_p_value)} among {self.num_comparisons} comparisons"
        return f"{alone} alone, {among} (Holm's correction)"

    @override
    def __str__(self) -> str:
        reason = self.reason
        return f"{self.claim}: {reason}" if reason else self.claim


def in_words(num_seeds: float) -> str:
    """Write how many seeds are needed: `about 12`, `more than 1,000`."""
    return f"more than {_MOST_SEEDS:,}" if num_seeds > _MOST_SEEDS else f"about {num_seeds}"


def verdicts(hypotheses: Mapping[_Key, Hypothesis]) -> dict[_Key, Verdict]:
    """Decide each hypothesis: "not worse", "worse" or "undecided".

    The claims "not worse" are one family and the claims "worse" another, each with one claim per hypothesis. A family
    contains a false claim with probability `ALPHA` at most (see `p_values`, `holm`). Hypotheses that cannot be tested
    count too, because they would have been tested. No hypothesis gets both claims.

    Raises:
        ModuleNotFoundError: Without scipy.

    """
    found = [p_values(hypothesis) for hypothesis in hypotheses.values()]
    adjusted = map(PValues, holm([p.not_worse for p in found]), holm([p.worse for p in found]))
    return {
        key: _decide(hypotheses[key], p, after_holm, len(found))
        for key, p, after_holm in zip(hypotheses, found, adjusted, strict=True)
    }


def _decide(hypothesis: Hypothesis, p: PValues, adjusted: PValues, num_comparisons: int) -> Verdict:
    cost, margin = hypothesis.cost, hypothesis.margin
    count = len(cost.values)
    if hypothesis.obstacle is not None:
        return Verdict("undecided", cost.mean, cost.sd, margin=margin, num_pairs=count, because=hypothesis.obstacle)
    if cost.num_not_finite:
        because = f"not finite with all {count} seeds, where the reference is finite"
        return Verdict("worse", cost.mean, cost.sd, margin=margin, num_pairs=count, because=because)
    claim: Claim = "not worse" if p.not_worse < p.worse else "worse"  # the two claims exclude each other
    together = adjusted.not_worse if claim == "not worse" else adjusted.worse
    is_decided = cost.sd == 0 or together <= ALPHA
    return Verdict(
        claim if is_decided else "undecided",
        cost=cost.mean,
        sd=cost.sd,
        bounds=cost.bounds(),
        margin=margin,
        num_pairs=count,
        p_value=min(p),
        adjusted_p_value=together,
        num_comparisons=num_comparisons,
        seeds_needed=None if is_decided else _seeds_needed(hypothesis, num_comparisons),
    )


def _seeds_needed(hypothesis: Hypothesis, num_comparisons: int) -> float | None:
    """Return about how many seeds would decide; `None` with a margin of 0, where no number of seeds decides.

    The number is chosen to show "not worse" if the true cost is 0. If there are that many seeds already, it is chosen
    to distinguish the measured cost from the margin.
    """
    mean, sd, margin = hypothesis.cost.mean or 0.0, hypothesis.cost.sd or 0.0, hypothesis.margin
    if margin == 0:
        return None
    count, number = len(hypothesis.cost.values), seeds_needed(sd, margin, num_comparisons)
    return number if number > count else max(count + 1, seeds_needed(sd, abs(margin - mean), num_comparisons))
