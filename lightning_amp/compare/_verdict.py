"""`Verdict`: whether an arm is worse than the reference in one metric, as a value from the statistics to the page."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from typing_extensions import final, override

from lightning_amp._arguments import is_number, require
from lightning_amp._text import rounded
from lightning_amp.compare._statistics import Hypothesis, PValues, holm, p_values, seeds_needed

Claim = Literal["not worse", "worse", "undecided", "no margin"]

MOST_SEEDS = 1000
"""A larger number of seeds is not worth a figure: nobody runs them."""

_Key = TypeVar("_Key", bound=Hashable)


@final
@dataclass(frozen=True)
class Verdict:
    """Whether an arm is worse than the reference in one metric; `str` writes it as a sentence.

    Costs are in the metric's own unit; a positive cost is worse.

    Attributes:
        claim: `"not worse"`, `"worse"`, `"undecided"`, or `"no margin"` where nobody said what the arm may cost.
        cost: Mean cost over the pairs of runs; `None` if there is none.
        sd: Standard deviation of the cost over the pairs; `None` with fewer than two.
        bounds: Two one-sided bounds of the mean cost, each wrong with probability `alpha`; `None` where nothing could
            be tested.
        margin: What the arm may cost; `None` without a margin.
        num_pairs: How many runs could be compared with one of the reference that has the same seed.
        p_value: Of the claim that is nearer, by itself: `"not worse"` or `"worse"`; `None` where nothing was tested.
        adjusted_p_value: The same after Holm's correction for all metrics and arms together; this one decides.
        num_comparisons: How many metrics and arms were judged together.
        alpha: How probable one false claim may be among them.
        seeds_needed: About how many seeds would decide what is undecided; `None` if it is decided, or if more seeds
            would not help.
        because: What stands in the place of numbers: why these runs decide nothing, or why they need no test.

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
    alpha: float = 0.05
    seeds_needed: float | None = None
    because: str = ""

    @property
    def reason(self) -> str:
        """Write what the claim rests on; empty if there is nothing to say."""
        if self.because or self.cost is None or self.bounds is None or self.margin is None:
            return self.because
        mean, low, high, margin = (rounded(value) for value in (self.cost, *self.bounds, self.margin))
        if self.sd == 0:
            return f"cost {mean} in each of {self.num_pairs} pairs, margin {margin}"
        level = f"one-sided {100 * (1 - self.alpha):.3g} % bound"
        alone, together = self.p_value or 0.0, self.adjusted_p_value or 0.0
        among = f"{rounded(together)} among {self.num_comparisons} comparisons"
        if self.claim != "undecided":
            bound = f"at most {high}" if self.claim == "not worse" else f"at least {low}"
            p_value = f"; p = {among}" if self.num_comparisons > 1 else ""
            return f"mean cost {mean}, {bound} ({level}), margin {margin}, {self.num_pairs} pairs{p_value}"
        p_value = f"; p = {rounded(alone)} alone, but {among}" if alone <= self.alpha else ""
        interval = f"between {low} and {high} ({level}s)"
        takes = (
            "with a margin of 0 no number of seeds shows that an arm is not worse, unless it is equal or better"
            if self.seeds_needed is None
            else f"it takes {in_words(self.seeds_needed)} seeds"
        )
        return f"mean cost {mean}, {interval}, margin {margin}, {self.num_pairs} pairs{p_value}; {takes}"

    @override
    def __str__(self) -> str:
        reason = self.reason
        return f"{self.claim}: {reason}" if reason else self.claim


def in_words(num_seeds: float) -> str:
    """Write a number of seeds that is needed: `about 12`, `more than 1,000`."""
    return f"more than {MOST_SEEDS:,}" if num_seeds > MOST_SEEDS else f"about {num_seeds}"


def verdicts(hypotheses: Mapping[_Key, Hypothesis], alpha: float = 0.05) -> dict[_Key, Verdict]:
    """Decide each hypothesis: "not worse", "worse" or "undecided".

    The claims "not worse" are one family and the claims "worse" another, each of all hypotheses: at least one false
    claim is in a family with probability `alpha` at most (see `p_values`, `holm`). Hypotheses that cannot be tested
    count too, since they would have been. No hypothesis gets both claims.

    Raises:
        ModuleNotFoundError: Without scipy.
        ValueError: If `alpha` is not between 0 and 0.5.
    """
    fine = is_number(alpha) and 0 < alpha < 0.5
    require(fine, "alpha", "a number between 0 and 0.5, exclusive", alpha, "Usual is `alpha=0.05`.")
    found = [p_values(hypothesis) for hypothesis in hypotheses.values()]
    adjusted = map(PValues, holm([p.not_worse for p in found]), holm([p.worse for p in found]))
    return {
        key: _decided(hypotheses[key], p, after_holm, alpha, len(found))
        for key, p, after_holm in zip(hypotheses, found, adjusted, strict=True)
    }


def _decided(hypothesis: Hypothesis, p: PValues, adjusted: PValues, alpha: float, num_comparisons: int) -> Verdict:
    cost, margin = hypothesis.cost, hypothesis.margin
    count = len(cost.values)
    if hypothesis.obstacle is not None:
        return Verdict("undecided", cost.mean, cost.sd, margin=margin, num_pairs=count, because=hypothesis.obstacle)
    if cost.num_not_finite:
        because = f"not finite with all {count} seeds, where the reference is finite"
        return Verdict("worse", cost.mean, cost.sd, margin=margin, num_pairs=count, because=because)
    claim: Claim = "not worse" if p.not_worse < p.worse else "worse"  # only of this one there can be evidence
    alone, together = min(p), adjusted.not_worse if claim == "not worse" else adjusted.worse
    is_decided = cost.sd == 0 or together <= alpha
    low, high = cost.bounds(alpha)
    return Verdict(
        claim if is_decided else "undecided",
        cost=cost.mean,
        sd=cost.sd,
        bounds=None if low is None or high is None else (low, high),
        margin=margin,
        num_pairs=count,
        p_value=alone,
        adjusted_p_value=together,
        num_comparisons=num_comparisons,
        alpha=alpha,
        seeds_needed=None if is_decided else _seeds_needed(hypothesis, alpha, num_comparisons),
    )


def _seeds_needed(hypothesis: Hypothesis, alpha: float, num_comparisons: int) -> float | None:
    """Return about how many seeds would decide; with a margin of 0 no number does.

    At first as many as show that the arm costs nothing; with that many and still undecided, as many as tell the cost
    that was seen from the margin.
    """
    mean, sd, margin = hypothesis.cost.mean or 0.0, hypothesis.cost.sd or 0.0, hypothesis.margin
    if margin == 0:
        return None
    count, number = len(hypothesis.cost.values), seeds_needed(sd, margin, alpha, num_comparisons)
    return number if number > count else max(count + 1, seeds_needed(sd, abs(margin - mean), alpha, num_comparisons))
