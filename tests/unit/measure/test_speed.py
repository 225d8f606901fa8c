"""The timing of runs in rounds, and the statistic behind every sentence about speed, with its error rates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from lightning_amp.measure import SpeedComparison, in_rounds, paired_log_ratio
from lightning_amp.measure._speed import t_quantile


def simulated_seeds(
    rng: np.random.Generator, true_ratio: float, num_seeds: int, num_steps: int = 60, step_noise: float = 0.2
) -> list[float]:
    """Return log-ratios, one per seed, of a contestant that takes `true_ratio` times as long.

    The batches of a seed vary eightfold in length, and both contestants see the same batches. Each step has its own
    noise, and processes differ in speed by a few percent.
    """
    lengths = np.exp(rng.uniform(0, math.log(8), (num_seeds, num_steps)))
    offsets = rng.normal(0, 0.03, (2, num_seeds, 1))
    one, other = lengths * np.exp(offsets + rng.normal(0, step_noise, (2, num_seeds, num_steps)))
    return [paired_log_ratio(a, b) for a, b in zip((true_ratio * one).tolist(), other.tolist(), strict=True)]


def claims(true_ratio: float, num_seeds: int, draws: int = 400) -> dict[str, float]:
    rng = np.random.default_rng(0)
    found = [SpeedComparison.of(simulated_seeds(rng, true_ratio, num_seeds)).claim for _ in range(draws)]
    return {claim: found.count(claim) / draws for claim in ("faster", "slower", "same", "undecided")}


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_a_run_beside_itself_is_called_different_in_at_most_one_of_twenty_cases(num_seeds: int) -> None:
    found = claims(1.0, num_seeds)
    assert found["faster"] + found["slower"] <= 0.05 + 0.025  # two standard errors of 400 draws


def test_a_true_factor_of_one_and_a_half_is_found_with_three_seeds() -> None:
    assert claims(1.5, 3)["slower"] >= 0.98


def test_two_percent_are_not_claimed_from_three_seeds() -> None:
    found = claims(1.02, 3)
    assert found["slower"] <= 0.08
    assert found["undecided"] >= 0.85


def test_more_seeds_find_a_smaller_difference() -> None:
    few, many = claims(1.1, 3, draws=200)["slower"], claims(1.1, 8, draws=200)["slower"]
    assert few < 0.5
    assert many > 0.9


@pytest.mark.parametrize("num_rounds", [3, 5, 9, 15])
def test_rounds_in_one_process_are_called_different_in_at_most_one_of_a_hundred_cases(num_rounds: int) -> None:
    rng = random.Random(1)
    draws = 2000
    wrong = 0
    for _ in range(draws):
        rounds = [rng.gauss(0, 0.2 * math.sqrt(2)) for _ in range(num_rounds)]
        wrong += SpeedComparison.of(rounds, level=0.99).claim in ("faster", "slower")
    assert wrong / draws <= 0.01 + 0.005


def test_exactly_one_and_a_half_in_every_pair_is_a_claim() -> None:
    found = SpeedComparison.of([paired_log_ratio([1.5, 3.0, 12.0], [1.0, 2.0, 8.0])] * 3)
    assert (found.claim, str(found)) == ("slower", "1.50x as slow (1.50 to 1.50)")


def test_lengths_of_batches_cancel() -> None:
    assert paired_log_ratio([1.1, 8.8, 2.2], [1.0, 8.0, 2.0]) == pytest.approx(math.log(1.1))


@pytest.mark.parametrize(
    ("log_ratios", "claim", "decided", "text"),
    [
        ([-0.3, -0.25, -0.28], "faster", math.exp(0.83 / 3), "1.3x as fast (1.2 to 1.4)"),
        ([0.40, 0.45, 0.36], "slower", math.exp(-1.21 / 3), "1.5x as slow (1.3 to 1.7)"),
        ([0.01, 0.0, -0.01], "same", 1.0, "as fast within 5 %"),
        ([0.3, -0.1, 0.2], "undecided", None, "speed undecided: 0.52x to 1.47x"),
        ([3.0, -2.0], "undecided", None, "speed undecided"),
        ([0.04, 0.10, 0.05, 0.03], "slower", None, "1.06x as slow (1.01 to 1.11)"),
        ([1.335], "one run", None, "3.8x as slow, one run of each"),
        ([-0.26], "one run", None, "1.3x as fast, one run of each"),
        ([0.0], "one run", None, "1.000x as fast, one run of each"),
    ],
)
def test_each_claim_and_its_words(log_ratios: list[float], claim: str, decided: float | None, text: str) -> None:
    found = SpeedComparison.of(log_ratios)
    assert (found.claim, str(found)) == (claim, text)
    if claim in ("undecided", "one run"):
        assert found.decided_ratio is None
    elif decided is not None:
        assert found.decided_ratio == pytest.approx(decided)


def test_both_ends_of_an_interval_are_never_written_as_no_difference() -> None:
    rng = random.Random(2)
    for _ in range(500):
        values = [rng.gauss(rng.uniform(-0.5, 0.5), 0.05) for _ in range(rng.randint(2, 6))]
        found = SpeedComparison.of(values)
        if found.claim in ("faster", "slower"):
            numbers = [
                float(word.strip("(x)").rstrip("x")) for word in str(found).split() if word.strip("(x)")[0].isdigit()
            ]
            assert min(numbers) > 0.999, str(found)
            assert numbers[1] <= numbers[0] <= numbers[2], str(found)


@pytest.mark.parametrize("freedom", [1, 2, 3, 8, 29, 200])
@pytest.mark.parametrize("probability", [0.95, 0.975, 0.995])
def test_the_quantile_is_scipys(probability: float, freedom: int) -> None:
    special = pytest.importorskip("scipy.special")
    # scipy 1.11 is exact to 2e-9
    assert t_quantile(probability, freedom) == pytest.approx(special.stdtrit(freedom, probability), rel=1e-8)


# -- rounds -----------------------------------------------------------------------------------------------------------


def runs(turns: list[str], **seconds: float) -> dict[str, Callable[[], float]]:
    def run(name: str) -> Callable[[], float]:
        return lambda: turns.append(name) or seconds[name] * len(turns)

    return {name: run(name) for name in seconds}


def test_each_round_reverses_the_order_and_the_first_calls_do_not_count() -> None:
    turns: list[str] = []
    found = in_rounds(runs(turns, a=1.0, b=10.0), lambda number: "ab" if number < 3 else ())
    assert "".join(turns) == "ab" + "ba" + "ab" + "ba"
    assert found == {"a": [4.0, 5.0, 8.0], "b": [30.0, 60.0, 70.0]}


def test_the_names_are_asked_for_before_each_round() -> None:
    turns: list[str] = []
    found = in_rounds(runs(turns, a=1.0, b=1.0), lambda number: ["ab", "a", "a", ""][number])
    assert "".join(turns) == "ab" + "ba" + "a" + "a"
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 1}


def test_a_run_that_fails_takes_part_in_no_round() -> None:
    def fails() -> float:
        raise RuntimeError("no kernel")

    told: list[str] = []
    both = {"a": fails, "b": lambda: 1.0}
    found = in_rounds(both, lambda n: "ab"[n:], lambda name, error: told.append(f"{name}: {error}"))
    assert (found, told) == ({"b": [1.0, 1.0]}, ["a: no kernel"])
    with pytest.raises(RuntimeError, match="no kernel"):
        in_rounds(both, lambda n: "ab"[n:])
