from __future__ import annotations

import math
import random
import runpy
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lightning_amp.compare import _statistics
from lightning_amp.compare._statistics import (
    Difference,
    Direction,
    Hypothesis,
    holm,
    p_values,
    scipy_special,
    seeds_needed,
)  # fmt: skip
from lightning_amp.compare._verdict import Claim, Verdict, verdicts

INF, NAN = math.inf, math.nan


def verdict(
    *values: float,
    margin: float = 0.1,
    direction: Direction = "min",
    failed: int = 0,
    bad_references: int = 0,
) -> Verdict:
    return verdicts({"it": Hypothesis(Difference(values, bad_references), direction, margin, failed)})["it"]


# -- differences -------------------------------------------------------------------------------------------------------


def test_a_difference_is_the_arm_minus_the_reference() -> None:
    assert Difference.of([(3.0, 1.0), (0.5, 1.0)]) == Difference((2.0, -0.5))
    assert Difference.of([(1.0, INF), (NAN, 1.0)]).num_reference_not_finite == 1


@pytest.mark.parametrize("values", [(0.3, 0.1, 0.7), (1e-9, 2e-9), (5.0, -5.0, 5.0, 1e3)])
def test_the_bounds_are_those_of_scipys_interval(values: tuple[float, ...]) -> None:
    difference = Difference(values)
    low, high = stats.t.interval(0.90, len(values) - 1, np.mean(values), stats.sem(values))
    assert difference.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert difference.sd == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert difference.bounds() == pytest.approx((low, high), rel=1e-9)


def test_fewer_than_two_pairs_have_no_spread() -> None:
    for difference, mean in ((Difference(()), None), (Difference((0.5,)), 0.5)):
        assert difference.mean == mean
        assert difference.sd is difference.bounds() is None


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e308, 5e-324])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_bounds_of_equal_values_are_their_mean(value: float, count: int) -> None:
    difference = Difference((value,) * count)
    assert (difference.mean, difference.sd, difference.bounds()) == (value, 0.0, (value, value))


@pytest.mark.parametrize("values", [(NAN, 1.0), (INF, 1.0, 2.0), (INF, -INF), (NAN, NAN)])
def test_values_that_are_not_finite_have_no_bounds(values: tuple[float, ...]) -> None:
    difference = Difference(values)
    assert not math.isfinite(difference.mean)
    assert all(math.isnan(value) for value in (difference.sd, *difference.bounds()))


def test_large_and_small_values_neither_over_nor_underflow() -> None:
    assert Difference((1e300, 3e300)).sd == pytest.approx(math.sqrt(2) * 1e300)
    assert Difference((1e-300, 3e-300)).sd == pytest.approx(math.sqrt(2) * 1e-300)


def test_a_spread_beyond_all_numbers_shows_nothing() -> None:
    too_wide = Difference((-1.7e308, -1.7e308, 1.7e308))
    assert too_wide.sd == too_wide.bounds()[1] == INF
    assert p_values(Hypothesis(too_wide, "min", 1.7e308)) == (1.0, 1.0)  # not NaN, which has no place in an order
    assert verdict(*too_wide.values).claim == "undecided"


def test_the_order_of_pairs_does_not_change_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    for values in rng.normal(0.1, 0.1, (2000, 8)):
        difference, other = Difference(tuple(values.tolist())), Difference(tuple(rng.permutation(values).tolist()))
        assert (difference.mean, difference.sd) == (other.mean, other.sd)


# -- single verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "margin", "begins"),
    [
        ((0.01, 0.02, 0.00, 0.01), 0.1, "not worse: mean cost 0.01, at most 0.0196 (one-sided 95 % bound), margin 0.1"),
        ((0.31, 0.32, 0.30, 0.31), 0.1, "worse: mean cost 0.31, at least 0.3 (one-sided 95 % bound), margin 0.1, 4"),
        ((-0.1, 0.0, 0.1), 0.1, "undecided: mean cost 0, between -0.169 and 0.169 (one-sided 95 % bounds), margin 0.1"),
        ((0.0, 0.0, 0.0), 0.0, "not worse: cost 0 in each of 3 pairs, margin 0"),
        ((0.1, 0.1, 0.1), 0.1, "not worse: cost 0.1 in each of 3 pairs, margin 0.1"),
        ((0.3, 0.3, 0.3), 0.1, "worse: cost 0.3 in each of 3 pairs, margin 0.1"),
        ((1e-9, 1e-9, 1e-9), 0.0, "worse: cost 1e-09 in each of 3 pairs, margin 0"),
    ],
)
def test_a_verdict(values: tuple[float, ...], margin: float, begins: str) -> None:
    assert str(verdict(*values, margin=margin)).startswith(begins)
    turned = tuple(-value for value in values)
    assert verdict(*turned, margin=margin, direction="max") == verdict(*values, margin=margin)


def test_a_cost_of_the_margin_is_within_it_up_to_rounding() -> None:
    values = [0.91 - 0.90] * 3
    assert values[0] > 0.01
    assert verdict(*values, margin=0.01).claim == "not worse"
    assert verdict(*(np.float32([0.91] * 3) - np.float32(0.90)).tolist(), margin=0.01).claim == "worse"  # 2e-6 more
    assert verdict(*[0.01001] * 3, margin=0.01).claim == "worse"


@pytest.mark.parametrize(
    ("costs", "failed", "bad_references", "says"),
    [
        ((), 0, 0, "there is no pair of runs"),
        ((0.0,), 0, 0, "one seed never decides, it takes at least three; mean cost 0, margin 0.1"),
        ((0.5, 0.5), 0, 0, "two seeds never decide, it takes at least three; mean cost 0.5, margin 0.1"),
        ((0.0,) * 3, 2, 0, "it failed with 2 of 5 seeds, and judging only the surviving seeds would bias the result"),
        ((9.0,) * 9, 1, 0, "it failed with 1 of 10 seeds, and judging only the surviving seeds would bias the result"),
        ((NAN,) * 3, 1, 0, "it failed with 1 of 4 seeds, and judging only the surviving seeds would bias the result"),
        ((), 5, 0, "it failed with all 5 seeds"),
        ((), 1, 0, "it failed with the only seed"),
        ((NAN, 0.0, 0.0), 0, 0, "not finite with 1 of 3 seeds"),
        ((NAN, INF), 0, 0, "not finite with 2 of 2 seeds"),
        ((NAN,), 0, 0, "not finite with 1 of 1 seed"),
        ((NAN,) * 3, 0, 3, "the reference itself is not finite with 3 of 3 seeds"),
        ((NAN, 0.0, 0.0), 0, 1, "the reference itself is not finite with 1 of 3 seeds"),
    ],
)
@pytest.mark.parametrize("direction", ["min", "max"])
def test_pairs_that_decide_nothing(
    costs: tuple[float, ...], failed: int, bad_references: int, says: str, direction: Direction
) -> None:
    values = costs if direction == "min" else tuple(-cost for cost in costs)
    found = verdict(*values, direction=direction, failed=failed, bad_references=bad_references)
    assert str(found) == f"undecided: {says}"


@pytest.mark.parametrize("direction", ["min", "max"])
def test_an_arm_that_is_never_finite_is_worse(direction: Direction) -> None:
    assert (
        str(verdict(NAN, INF, -INF, direction=direction))
        == "worse: not finite with all 3 seeds, where the reference is finite"
    )


def test_the_reference_that_is_not_finite_is_counted_in_the_pairs() -> None:
    difference = Difference.of([(0.0, NAN), (INF, INF), (0.0, 0.0)])
    assert (
        str(verdicts({0: Hypothesis(difference, "min", 0.1)})[0])
        == "undecided: the reference itself is not finite with 2 of 3 seeds"
    )


def test_a_verdict_is_a_value() -> None:
    found = verdict(0.01, 0.02, 0.00, 0.01)
    assert (found.claim, found.margin, found.num_pairs, found.num_comparisons) == ("not worse", 0.1, 4, 1)
    assert (found.cost, found.bounds) == (pytest.approx(0.01), pytest.approx((0.0004, 0.0196), abs=1e-4))
    assert found.p_value == found.adjusted_p_value == pytest.approx(0.0002, abs=1e-4)
    assert found.seeds_needed is None
    assert found.details == "p = 0.000102"
    assert verdict(0.0, 0.0, 0.0).details == Verdict("no margin").details == ""
    assert verdict(-0.2, 0.0, 0.2).seeds_needed == 25
    assert str(Verdict("no margin")) == "no margin"


# -- how many seeds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sd", "number"), [(0.1, 7), (0.2, 25), (0.3, 56), (0.001, 3), (0.0, 3)])
def test_seeds_needed(sd: float, number: int) -> None:
    assert seeds_needed(sd, 0.1) == number


def test_more_comparisons_need_more_seeds() -> None:
    assert [seeds_needed(0.2, 0.1, num_hypotheses=count) for count in (1, 4, 20)] == [25, 39, 54]
    assert seeds_needed(0.2, 0.0) == seeds_needed(0.2, 1e-320) == seeds_needed(INF, 0.1) == INF


@pytest.mark.parametrize(("sd", "number"), [(0.1, "7"), (0.2, "25"), (0.3, "56")])
def test_undecided_says_how_many_seeds_it_takes(sd: float, number: str) -> None:
    assert str(verdict(-sd, 0.0, sd)).endswith(f"3 pairs; it takes about {number} seeds")


def test_with_that_many_seeds_the_cost_that_was_seen_counts() -> None:
    values = [0.08 + 0.1 * math.sqrt(7 / 8) * sign for sign in (-1, 1) * 4]
    assert statistics.stdev(values) == pytest.approx(0.1)
    assert str(verdict(*values[:6])).endswith("it takes about 7 seeds")
    assert str(verdict(*values)).endswith("8 pairs; it takes about 155 seeds")


def test_more_comparisons_take_more_seeds() -> None:
    def among(values: Sequence[float], others: int) -> float | None:
        asked = [Hypothesis(Difference(tuple(values)), "min", 0.1), *[Hypothesis(Difference(()), "min", 0.1)] * others]
        return verdicts(dict(enumerate(asked)))[0].seeds_needed

    assert among((-0.2, 0.0, 0.2), 3) == 39
    seen = [0.08 + 0.1 * math.sqrt(11 / 12) * sign for sign in (-1, 1) * 6]
    assert among(seen, 3) == 238


def test_it_takes_more_seeds_than_there_are() -> None:
    values = (-1.0, 0.0, 1.0)  # t = 2.8, where 2.92 would do; by the normal approximation three seeds do
    assert seeds_needed(1.0, 2.8 / math.sqrt(3)) == 3
    assert str(verdict(*values, margin=2.8 / math.sqrt(3))).endswith("it takes about 4 seeds")


def test_no_sensible_number_of_seeds() -> None:
    assert str(verdict(-1.0, 0.0, 1.0, margin=0.01)).endswith("it takes more than 1,000 seeds")
    assert str(verdict(-1.0, 0.0, 1.0, margin=1e-300)).endswith("it takes more than 1,000 seeds")
    assert "with a margin of 0 no number of seeds shows" in str(verdict(-1.0, 0.0, 1.0, margin=0.0))
    mean_at_margin = [0.1 + 0.05 * sign for sign in (-1, 1) * 10]
    assert str(verdict(*mean_at_margin)).endswith("it takes more than 1,000 seeds")


# -- several verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "adjusted"),  # of `p.adjust(values, "holm")` in R
    [
        ([0.01, 0.02, 0.03, 0.04], [0.04, 0.06, 0.06, 0.06]),
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.4, 0.9, 0.5], [1.0, 1.0, 1.0]),
        ([0.03], [0.03]),
        ([], []),
    ],
)
def test_holm(values: list[float], adjusted: list[float]) -> None:
    assert holm(values) == pytest.approx(adjusted)


@pytest.mark.parametrize("seed", range(5))
def test_the_p_values_are_those_of_scipys_t_test(seed: int) -> None:
    values = np.random.default_rng(seed).normal(0.05, 0.1, 3 + seed)
    found = p_values(Hypothesis(Difference(tuple(values.tolist())), "min", 0.1))
    for p, alternative in zip(found, ("less", "greater"), strict=True):
        assert p == pytest.approx(stats.ttest_1samp(values, 0.1, alternative=alternative).pvalue, rel=1e-9)


def test_evidence_for_one_comparison_may_not_do_for_several() -> None:
    def at(mean: float) -> Hypothesis:
        return Hypothesis(Difference((mean - 0.01, mean, mean + 0.01)), "min", 0.1)

    alone = verdicts({"a": at(0.08)})["a"]
    assert str(alone).startswith("not worse: mean cost 0.08, at most 0.0969 ")
    assert str(alone).endswith("3 pairs")

    with_others = verdicts({"a": at(0.08), "b": at(0.05), "c": at(0.1)})
    assert str(with_others["a"]).startswith("undecided: mean cost 0.08, between 0.0631 and 0.0969 ")
    assert str(with_others["a"]).endswith(
        "3 pairs; enough for one comparison, not for 3 at once; it takes about 4 seeds"
    )
    assert with_others["a"].details == "p = 0.0371 alone, 0.0742 among 3 comparisons (Holm's correction)"
    assert with_others["b"].claim == "not worse"
    assert str(with_others["b"]).endswith("3 pairs")
    assert alone.details == "p = 0.0371"

    # Holm's correction becomes weaker with each claim, and counts the hypotheses that cannot be tested.
    identical, failed = Difference((0.0,) * 3), Hypothesis(Difference(()), "min", 0.1, num_failed=3)
    assert verdicts({"a": at(0.08), "b": Hypothesis(identical, "min", 0.1)})["a"].claim == "not worse"
    assert verdicts({"a": at(0.08), "b": failed})["a"].claim == "undecided"


def test_worse_is_a_family_of_its_own() -> None:
    better, worse = ((mean - 0.01, mean, mean + 0.01) for mean in (0.08, 0.12))
    found = verdicts({key: Hypothesis(Difference(values), "min", 0.1) for key, values in (("a", better), ("b", worse))})
    assert {key: verdict.claim for key, verdict in found.items()} == {"a": "undecided", "b": "undecided"}
    assert found["b"].details == "p = 0.0371 alone, 0.0742 among 2 comparisons (Holm's correction)"
    not_finite = Hypothesis(Difference((NAN,) * 3), "min", 0.1)
    found = verdicts({"b": Hypothesis(Difference(worse), "min", 0.1), "nan": not_finite})
    assert {key: verdict.claim for key, verdict in found.items()} == {"b": "worse", "nan": "worse"}


def test_no_hypotheses_have_no_verdicts() -> None:
    assert verdicts({}) == {}


# -- properties --------------------------------------------------------------------------------------------------------

numbers = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.1, 0.09, 0.11])
margins = st.floats(0, 1e300) | st.sampled_from([0.0, 0.1])
hypotheses = st.builds(
    Hypothesis,
    st.builds(Difference, st.lists(numbers, max_size=6).map(tuple), st.sampled_from([0, 0, 0, 1])),
    st.sampled_from(["min", "max"]),
    margins,
    st.sampled_from([0, 0, 0, 2]),
)


@given(st.lists(hypotheses, max_size=4))
def test_whatever_comes_gets_one_verdict(asked: list[Hypothesis]) -> None:
    found = [p_values(hypothesis) for hypothesis in asked]
    assert all(p.not_worse > 0.05 or p.worse > 0.05 for p in found)
    for hypothesis, found_one in zip(asked, verdicts(dict(enumerate(asked))).values(), strict=True):
        if len(hypothesis.difference.values) < 3 or hypothesis.num_failed:
            assert found_one.claim == "undecided"
        assert found_one.claim in get_args(Claim)
        assert "\n" not in str(found_one)


@given(st.lists(hypotheses, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_pairs_and_the_direction_change_nothing(asked: list[Hypothesis], order: random.Random) -> None:
    def changed(hypothesis: Hypothesis) -> Hypothesis:
        values = [-value for value in hypothesis.difference.values]
        order.shuffle(values)
        turned: Direction = "max" if hypothesis.direction == "min" else "min"
        difference = Difference(tuple(values), hypothesis.difference.num_reference_not_finite)
        return Hypothesis(difference, turned, hypothesis.margin, hypothesis.num_failed)

    turned, straight = (verdicts(dict(enumerate(each))) for each in (map(changed, asked), asked))
    assert list(map(str, turned.values())) == list(map(str, straight.values()))


# -- how often it is wrong ---------------------------------------------------------------------------------------------


def simulated(runs: int, pairs: int, comparisons: int, true_cost: float, shared: float = 0.0) -> np.ndarray:
    """Return costs [runs, comparisons, pairs] with a spread of 0.1, of which comparisons share the part `shared`."""
    rng = np.random.default_rng([pairs, comparisons, int(1000 * true_cost)])
    own, common = rng.normal(size=(runs, comparisons, pairs)), rng.normal(size=(runs, 1, pairs))
    return true_cost + 0.1 * (math.sqrt(1 - shared) * own + math.sqrt(shared) * common)


def rates(costs: np.ndarray, margin: float = 0.1) -> dict[str, float]:
    """Return the share of runs in which each claim is made at least once."""
    count: Counter[str] = Counter()
    for run in costs.tolist():
        asked = {index: Hypothesis(Difference(tuple(values)), "min", margin) for index, values in enumerate(run)}
        count.update({verdict.claim for verdict in verdicts(asked).values()})
    return {name: count[name] / len(costs) for name in get_args(Claim)}


def four_sigma(rate: float, runs: int) -> float:
    return 4 * math.sqrt(rate * (1 - rate) / runs)


@pytest.mark.parametrize("pairs", [3, 8])
def test_a_claim_at_the_margin_is_wrong_in_one_of_twenty_cases(pairs: int) -> None:
    costs = simulated(10_000, pairs, 1, true_cost=0.1)
    found, error = rates(costs), four_sigma(0.05, len(costs))
    assert found["not worse"] == pytest.approx(0.05, abs=error)
    assert found["worse"] == pytest.approx(0.05, abs=error)

    # With the normal distribution instead of Student's t this test fails.
    reach = 1.645 * costs.std(-1, ddof=1) / math.sqrt(pairs)
    assert (costs.mean(-1) + reach < 0.1).mean() > 0.05 + error


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_four_comparisons_together_are_wrong_in_one_of_twenty_cases(shared: float) -> None:
    costs = simulated(3000, 5, 4, true_cost=0.1, shared=shared)
    found, error = rates(costs), four_sigma(0.05, len(costs))
    for name in ("not worse", "worse"):
        assert found[name] <= 0.05 + error
        if not shared:
            assert found[name] >= 0.05 - error  # 1 - (1 - 0.05 / 4)^4 = 0.049: nothing is given away

    # Without Holm this test fails.
    p = stats.ttest_1samp(costs, 0.1, axis=-1, alternative="less").pvalue
    assert (p <= 0.05).any(-1).mean() > 0.05 + error


def test_far_from_the_margin_wrong_claims_are_rarer_still() -> None:
    assert rates(simulated(2000, 5, 1, true_cost=0.2))["not worse"] < 0.01
    assert rates(simulated(2000, 5, 1, true_cost=0.0))["worse"] < 0.01


@pytest.mark.parametrize("margin", [0.05, 1 / 30])
def test_the_seeds_needed_show_it_in_four_of_five_cases(margin: float) -> None:
    pairs = int(seeds_needed(0.1, margin))
    assert pairs in {25, 56}
    power = stats.nct.cdf(stats.t.ppf(0.05, pairs - 1), pairs - 1, -margin / 0.1 * math.sqrt(pairs))
    assert power == pytest.approx(0.8, abs=0.02)  # Student's t costs a little: 0.783 and 0.794
    costs = simulated(3000, pairs, 1, true_cost=0.0)
    assert rates(costs, margin)["not worse"] == pytest.approx(power, abs=four_sigma(power, len(costs)))


# -- scipy -------------------------------------------------------------------------------------------------------------


def test_without_scipy_it_is_asked_for_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    runpy.run_path(_statistics.__file__)  # no import at the top
    assert verdict(0.5).claim == "undecided"
    assert verdict(0.0, 0.0, 0.0).claim == "not worse"
    for needs in (scipy_special, lambda: Difference((0.0, 1.0)).bounds(), lambda: verdict(0.0, 1.0, 2.0)):
        with pytest.raises(
            ModuleNotFoundError, match=r"need scipy, which is not installed\. Run `pip install scipy`\.$"
        ):
            needs()
