"""The speed of a variant, the limits of its gain, and how often a claim is wrong."""

from __future__ import annotations

import math
import random
from collections import Counter
from statistics import median
from typing import Any

import pytest
import torch
from support.doctor_facts import machine, step, timed
from support.planned_race import PlannedClock

from lightning_amp.advice import DoctorReport, _race
from lightning_amp.advice._gains import best_speed_up, gain, is_worth_it, measured, more_rows, most_gain, speed_up
from lightning_amp.advice._record import CHANNELS_LAST, FUSED, LARGER_BATCH, OptimizerFacts, Step, Variant
from lightning_amp.advice.findings._words import in_fp32
from lightning_amp.measure import SpeedComparison

PLAIN = (OptimizerFacts("AdamW", True, 1000),)


def raced(*seconds: float, base: tuple[float, ...] = (1.0,) * 9, **facts: Any) -> Step:
    return step(variants=(Variant("as it is", base), Variant("x", seconds)), **facts)


def test_a_gain_is_paired_by_round() -> None:
    busy = (1.0, 2.0, 1.0, 4.0, 1.0)  # the machine was busy in two rounds, for both
    found = gain(raced(*(s / 2 for s in busy), base=busy), "x")
    assert found is not None
    assert (found.ratio, found.claim, found.num_repetitions) == (pytest.approx(2.0), "faster", 5)


@pytest.mark.parametrize(
    ("seconds", "claim", "worth_it"),
    [
        ((0.5,) * 5, "faster", True),
        ((2.0,) * 5, "slower", False),
        ((0.98,) * 5, "same", False),
        ((0.9, 0.92, 0.91, 0.9, 0.91), "faster", True),
        ((0.5, 0.5, 2.0, 2.0, 0.9), "undecided", False),
        ((0.5, 0.5, 1.2), "undecided", False),  # one of three rounds says otherwise
        ((0.5, 0.52, 0.6), "undecided", False),  # of three rounds the best may be luck
        ((0.5,), "one run", False),
    ],
)
def test_only_a_gain_beyond_noise_is_claimed(seconds: tuple[float, ...], claim: str, worth_it: bool) -> None:
    found = gain(raced(*seconds), "x")
    assert found is not None
    assert (found.claim, is_worth_it(found)) == (claim, worth_it)


def test_a_variant_that_was_not_timed_has_no_gain() -> None:
    assert gain(step(), "x") is None
    assert gain(raced(), "x") is None
    assert not is_worth_it(None)
    assert gain(step(variants=(Variant("as it is", (1.0,)), Variant("x", (), "out of memory"))), "x") is None


def test_the_speed_up_is_against_fp32() -> None:
    found = speed_up(step())
    assert found is not None
    assert found.ratio == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("share", "products", "best"), [(0.8, 4.0, 2.5), (0.0, 4.0, 1.0), (1.0, 4.0, 4.0), (0.5, 0.0, 1.0)]
)
def test_amdahl(share: float, products: float, best: float) -> None:
    assert best_speed_up(step(fp32_product_share=share), products) == pytest.approx(best)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (SpeedComparison(4.0, 3.5, 4.6, 9), "4.0x as fast as in fp32 (3.5 to 4.6)"),
        (SpeedComparison(0.25, 0.2, 0.3, 9), "4.0x as slow as in fp32 (3.3 to 5.0)"),
        (SpeedComparison(1.0, 0.99, 1.01, 9), "as fast as in fp32 within 5 %"),
        (SpeedComparison(0.8, 0.6, 1.1, 9), "speed undecided: 0.60x to 1.10x of fp32's"),
        (SpeedComparison(0.8, 1e-7, 1e6, 3), "speed undecided"),
        (SpeedComparison(0.01, None, None, 1), "100x as slow as in fp32, one run of each"),
    ],
)
def test_a_comparison_with_fp32_in_words(found: Any, words: str) -> None:
    assert in_fp32(found) == words


# -- the limit of a gain -----------------------------------------------------------------------------------------------


def with_adamw(share: float, seconds: tuple[float, ...], label: str = FUSED) -> Step:
    parts = {"data": 0.05, "forward": 0.4 * (1 - share), "backward": 0.6 * (1 - share), "optimizer": share}
    return step(parts=parts, optimizers=PLAIN, variants=(timed("as it is", 1.0, rounds=9), Variant(label, seconds)))


def test_adamw_at_three_per_cent_of_a_step_cannot_give_1_18x() -> None:
    sure = with_adamw(0.03, (1 / 1.18,) * 9)
    assert most_gain(sure, FUSED) == pytest.approx(1 / 0.97)
    assert measured(sure, FUSED) is not None
    assert gain(sure, FUSED) is None
    page = str(DoctorReport(machine(), sure))
    assert "1.18" not in page
    assert "noise: 1.03x as fast is possible at most" in page
    assert not DoctorReport(machine(), sure).has_problems


def test_a_gain_whose_interval_exceeds_the_limit_is_cut_off() -> None:
    found = gain(with_adamw(0.2, tuple(1 / ratio for ratio in (1.1, 1.5, 1.2, 1.4, 1.3, 1.3, 1.2, 1.4, 1.4))), FUSED)
    assert found is not None
    assert found.ratio == found.high == pytest.approx(1.25)
    assert found.low is not None
    assert found.low < 1.25


def test_a_larger_batch_is_not_credited_with_less_time() -> None:
    facts = with_adamw(0.2, (0.9, 1.1) * 4 + (0.9,), LARGER_BATCH)
    found = more_rows(facts)
    assert found is not None
    assert found.ratio == pytest.approx(4.0)
    assert more_rows(step()) is None


def test_parts_that_were_not_timed_set_no_limit() -> None:
    assert most_gain(step(parts={}), FUSED) == math.inf
    assert most_gain(step(parts={"forward": 1.0}), CHANNELS_LAST) == math.inf


# -- error rates -------------------------------------------------------------------------------------------------------


class Noisy:
    """A contestant whose steps take a planned time with 20 % of noise."""

    def __init__(self, label: str, mean_s: float, rng: random.Random, clock: PlannedClock) -> None:
        self.label, self.mean_s, self.rng, self.clock = label, mean_s, rng, clock
        self.step_s: list[float] = []

    def round(self, track: Any, laps: int) -> None:
        times = [self.mean_s * math.exp(self.rng.gauss(0.0, 0.2)) for _ in range(laps)]
        self.clock.sleep(sum(times))
        self.step_s.append(median(times))

    def result(self) -> Variant:
        return Variant(self.label, tuple(self.step_s))


TRACK = _race.Track(torch.device("cpu"), {})


def claims(true_ratio: float, number: int, budget_s: float, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Race two contestants many times. Count the claims about `fused=True`, its warnings, and the rounds."""
    rng, clock = random.Random(0), PlannedClock()
    monkeypatch.setattr(_race, "time", clock)
    monkeypatch.setattr(_race, "_BUDGET_S", budget_s)
    found = Counter[str]()
    for _ in range(number):
        pair: Any = [Noisy("as it is", 1.0, rng, clock), Noisy(FUSED, 1 / true_ratio, rng, clock)]
        variants = _race.race(pair, TRACK)
        facts = step(parts={"forward": 0.5, "optimizer": 0.5}, optimizers=PLAIN, variants=variants)
        result = gain(facts, FUSED)
        assert result is not None
        found[result.claim] += 1
        (finding,) = (f for f in DoctorReport(machine(), facts).findings if f.code == "optimizer-not-fused")
        found["warning"] += finding.severity == "warning"
        found["gains nothing"] += finding.action.startswith("Leave it")
        found["rounds"] += len(variants[0].step_s)
    return found


@pytest.mark.parametrize(("budget_s", "rounds"), [(1.0, 3), (45.0, 5), (75.0, 9), (1e9, 18)])
def test_a_pair_without_a_difference_is_called_different_in_one_per_cent(
    budget_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 1000
    found = claims(1.0, number, budget_s, monkeypatch)
    assert rounds - 1 <= found["rounds"] / number <= rounds
    assert found["faster"] + found["slower"] <= 0.015 * number  # 1 %, and what 1,000 draws allow
    assert found["warning"] <= 0.01 * number


@pytest.mark.parametrize("budget_s", [1.0, 1e9])
def test_a_gain_is_not_called_nothing(budget_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = claims(1.15, 500, budget_s, monkeypatch)
    assert found["gains nothing"] <= 0.01 * 500


def test_a_true_gain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = claims(1.2, 200, 1e9, monkeypatch)
    assert found["warning"] >= 0.9 * 200
    at_once = claims(1.5, 200, 75.0, monkeypatch)
    assert at_once["warning"] >= 0.95 * 200
    assert at_once["rounds"] <= 9 * 200
