"""Axes: every value has its place, and every label tells its tick from the next."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_amp.compare.views._svg import (
    Axis,
    axis_around_zero,
    axis_from_zero,
    axis_of,
    axis_of_exponents,
    can_be_drawn,
    power_of_two,
)

floats = st.floats(allow_nan=True, allow_infinity=True)


def labels(axis: Axis) -> list[str]:
    return [tick.label for tick in axis.ticks]


def assert_sound(axis: Axis) -> None:
    assert axis.low < axis.high
    ends = (axis.low, axis.high)
    for value, _ in axis.ticks:
        assert axis.low <= value <= axis.high or any(math.isclose(value, end) for end in ends)  # 6 * 0.2 is above 1.2
    assert len(set(labels(axis))) == len(axis.ticks) <= 12
    places = [axis.place(tick.value) for tick in axis.ticks]
    assert places == sorted(places)
    assert all(a.value < b.value for a, b in itertools.pairwise(axis.ticks))


@given(st.lists(floats, max_size=30) | st.lists(st.floats(0, math.inf), max_size=5), st.booleans())
def test_every_value_has_a_place(values: list[float], may_be_log: bool) -> None:
    axis = axis_of(values, may_be_log=may_be_log)
    assert_sound(axis)
    for value in filter(can_be_drawn, values):
        assert 0 <= axis.place(value) <= 1
        assert axis.is_cut or axis.low <= value <= axis.high or abs(value) < 1e-200


@given(st.lists(floats, max_size=30))
def test_every_difference_has_a_place(values: list[float]) -> None:
    axis = axis_around_zero(values)
    assert_sound(axis)
    assert axis.low < 0 < axis.high
    assert all(axis.low <= value <= axis.high for value in filter(can_be_drawn, values))


@given(st.lists(st.integers(0, 10**9), max_size=5))
def test_steps_are_whole(values: list[int]) -> None:
    axis = axis_from_zero(map(float, values), whole=True)
    assert_sound(axis)
    assert axis.low == 0
    assert all(tick.value == round(tick.value) for tick in axis.ticks)


@given(st.lists(st.integers(-149, 127), max_size=5))
def test_exponents(values: list[int]) -> None:
    axis = axis_of_exponents(map(float, values))
    assert_sound(axis)
    assert all(axis.low < value < axis.high for value in values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.31, 0.32], ["0.310", "0.312", "0.314", "0.316", "0.318", "0.320"]),
        ([0.0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-3.0, 40_000.0], ["0", "10,000", "20,000", "30,000", "40,000"]),
        ([0.0, 4e-5], ["0", "1e-5", "2e-5", "3e-5", "4e-5"]),
        ([0.0, 2.5e7], ["0", "5e6", "1.0e7", "1.5e7", "2.0e7", "2.5e7"]),
    ],
)
def test_labels(values: list[float], expected: list[str]) -> None:
    assert labels(axis_of(values)) == expected


def test_equal_values_are_in_the_middle() -> None:
    for value in (0.0, 0.93, -4e5):
        axis = axis_of([value, value])
        assert axis.place(value) == pytest.approx(0.5)
        assert_sound(axis)


def test_rounding_is_not_blown_up() -> None:
    axis = axis_of([0.9, 0.9 + 1e-12])
    assert axis.high - axis.low > 5e-4


def test_a_wide_range_is_logarithmic_where_that_can_be() -> None:
    assert labels(axis_of([0.05, 2.0], may_be_log=True)) == ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert labels(axis_of([1e-4, 1e7], may_be_log=True)) == ["1e-4", "0.01", "1", "100", "10,000", "1e6"]
    assert labels(axis_of([0.01, 99.0], may_be_log=True)) == ["0.01", "0.1", "1", "10", "100"]
    middle = axis_of([0.01, 100.0], may_be_log=True)
    assert middle.is_log
    assert middle.place(1.0) == pytest.approx(0.5)
    assert middle.place(0.0) == middle.place(-1.0) == 0
    assert not axis_of([0.0, 100.0], may_be_log=True).is_log
    assert not axis_of([0.1, 2.9], may_be_log=True).is_log
    assert not axis_of([0.01, 100.0]).is_log


def test_an_outlier_does_not_flatten_the_rest() -> None:
    axis = axis_of([*(i / 100 for i in range(100)), -1e9])
    assert axis.is_cut
    assert axis.place(-1e9) == 0
    assert axis.place(0.9) - axis.place(0.1) > 0.2
    assert not axis_of([*(i / 100 for i in range(100)), -2.0]).is_cut


def test_powers_of_two() -> None:
    assert [power_of_two(value) for value in (2.0**16, 2.0**-14, 512.0, 3000.0)] == ["2¹⁶", "2⁻¹⁴", "512", "3,000"]
    assert labels(axis_of_exponents([13.0, 16.0])) == ["2¹³", "2¹⁴", "2¹⁵", "2¹⁶"]
