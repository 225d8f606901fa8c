"""Ratios of times, paired by round."""

from __future__ import annotations

import pytest
from support.doctor_facts import step

from lightning_amp.advice import Variant
from lightning_amp.advice._gains import best_speed_up, gain, speed_up


def found(*seconds: float, base: tuple[float, ...] = (1.0,) * 5) -> object:
    return gain(step(variants=(Variant("as it is", base), Variant("x", seconds))), "x")


def test_a_gain_is_a_median_of_pairs() -> None:
    noisy = (1.0, 2.0, 1.0, 4.0, 1.0)  # the machine was busy in two rounds, for both
    got = gain(step(variants=(Variant("as it is", noisy), Variant("x", tuple(s / 2 for s in noisy)))), "x")
    assert got is not None
    assert (got.ratio, got.low, got.high, got.rounds) == (2.0, 2.0, 2.0, 5)
    assert got.words == "2 times as fast (middle half 2 of 5 rounds)"
    assert got.is_clear
    assert not got.is_loss


@pytest.mark.parametrize(
    ("seconds", "clear", "loss"),
    [
        ((0.5,) * 5, True, False),
        ((2.0,) * 5, False, True),
        ((0.98,) * 5, False, False),  # too little
        ((0.5, 0.5, 2.0, 2.0, 0.9), False, False),  # noise
        ((0.5, 0.5, 1.2), False, False),  # of three rounds one says otherwise
        ((0.5, 0.5, 0.6), True, False),
        ((0.5, 0.5), False, False),  # too few
        ((0.5,), False, False),
    ],
)
def test_only_what_is_more_than_noise_is_clear(seconds: tuple[float, ...], clear: bool, loss: bool) -> None:
    got = found(*seconds)
    assert (got.is_clear, got.is_loss) == (clear, loss)  # type: ignore[attr-defined]


def test_what_was_not_timed_has_no_gain() -> None:
    assert gain(step(), "x") is None
    assert found() is None
    assert gain(step(variants=(Variant("as it is", (1.0,)), Variant("x", (), "out of memory"))), "x") is None


def test_the_speed_up_is_against_fp32() -> None:
    got = speed_up(step())
    assert got is not None
    assert got.ratio == 2.5


@pytest.mark.parametrize(
    ("share", "products", "best"), [(0.8, 4.0, 2.5), (0.0, 4.0, 1.0), (1.0, 4.0, 4.0), (0.5, 0.0, 1.0)]
)
def test_amdahl(share: float, products: float, best: float) -> None:
    assert best_speed_up(step(fp32_product_share=share), products) == pytest.approx(best)
