"""The axes of a chart: where a number lies between two ends, and which numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from lightning_amp._text import exact

_LARGEST = 1e250  # beyond it, differences and powers of two ends may overflow
_LOG_FROM = 30  # ratio of the largest to the smallest value from which on the axis is logarithmic
_CUT_FROM = 50  # ratio of the range of all values to that of nine tenths of them
_LEAST_SPAN = 1e-3  # relative: a shorter axis would show rounding, with labels that nobody can read


class Tick(NamedTuple):
    """A number on an axis, and how it is written."""

    value: float
    label: str


class Axis(NamedTuple):
    """An axis from `low` to `high`; `is_cut` if there are values beyond them."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_log: bool = False
    is_cut: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at `low`, 1 at `high`; what lies beyond an end is at that end."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def can_be_drawn(value: float) -> bool:
    """Return whether a value has a place on an axis: finite, and not so large that an axis overflows."""
    return abs(value) < _LARGEST


def axis_of(values: Iterable[float], *, may_be_log: bool = False, count: int = 6) -> Axis:
    """Return an axis on which all values have a place, with a little room at both ends.

    It is logarithmic if all values are positive and differ by a factor of 30 or more. Otherwise a few values that are
    very far from nine tenths of them are beyond its ends. Values that cannot be drawn are left out; without any the
    axis goes from 0 to 1.
    """
    found = sorted(_drawn(values)) or [0.0, 1.0]
    low, high = found[0], found[-1]
    if may_be_log and low > 0 and high / _LOG_FROM >= low:
        room = 0.04 * (math.log10(high) - math.log10(low))
        return _log_axis(math.log10(low) - room, math.log10(high) + room)
    if low == high == 0:
        low, high = -1.0, 1.0
    usual_low, usual_high = found[len(found) // 20], found[-1 - len(found) // 20]
    usual = usual_high - usual_low
    is_cut = 0 < _CUT_FROM * usual < high - low
    if is_cut:
        low, high = max(low, usual_low - usual), min(high, usual_high + usual)
    missing = max(0.0, max(abs(low), abs(high)) * _LEAST_SPAN - (high - low)) / 2
    room = 0.04 * (high - low) + missing
    return _linear_axis(low - room, high + room, count)._replace(is_cut=is_cut)


def axis_from_zero(values: Iterable[float], *, whole: bool = False, count: int = 6) -> Axis:
    """Return an axis from 0 to the largest value: of steps (`whole`: no fractions), of seconds."""
    high = max(_drawn(values), default=0.0)
    return _linear_axis(0.0, high if high > 0 else 1.0, count, least_step=1.0 if whole else 0.0)


def axis_around_zero(values: Iterable[float], *, count: int = 6) -> Axis:
    """Return an axis for differences: all values, and 0, with room at both ends."""
    found = [0.0, *_drawn(values)]
    low, high = min(found), max(found)
    if low == high:
        return _linear_axis(-1.0, 1.0, count)
    room = 0.06 * (high - low)
    return _linear_axis(low - room, high + room, count)


def axis_of_exponents(exponents: Iterable[float], *, count: int = 6) -> Axis:
    """Return an axis for log2 of something, whose labels are the powers: `2¹⁶`."""
    found = _drawn(exponents) or [0.0]
    low, high = math.floor(min(found)) - 1, math.ceil(max(found)) + 1
    step = max(1, math.ceil((high - low) / count))
    ticks = tuple(Tick(value, power_of_two(2.0**value)) for value in range(low + 1, high, step))
    return Axis(low, high, ticks)


def power_of_two(value: float) -> str:
    """Write a loss scale: `2¹⁶`, `512`, `3,000`."""
    text = exact(value)
    if not text.startswith("2**"):
        return text
    return "2" + text[3:].translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _drawn(values: Iterable[float]) -> list[float]:
    """Return the values that can be drawn; what is too small for a power of ten is 0."""
    return [value if abs(value) > 1 / _LARGEST else 0.0 for value in values if can_be_drawn(value)]


def _linear_axis(low: float, high: float, count: int, *, least_step: float = 0.0) -> Axis:
    raw = max((high - low) / count, least_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    largest = max(abs(low), abs(high))
    return Axis(low, high, tuple(Tick(i * step, _label(i * step, step, largest)) for i in range(first, last + 1)))


def _log_axis(low: float, high: float) -> Axis:
    """Return an axis between two powers of ten."""
    if high - low < 3:
        values = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high)) for factor in (1, 2, 5)]
    else:
        powers = range(math.ceil(low), math.floor(high) + 1)
        values = [10.0**power for power in powers[:: math.ceil(len(powers) / 6)]]
    ticks = [Tick(value, _short(value)) for value in values if low <= math.log10(value) <= high]
    return Axis(10.0**low, 10.0**high, tuple(ticks), is_log=True)


def _label(value: float, step: float, largest: float) -> str:
    """Write a tick with as many digits as tell it from its neighbours."""
    exponent = math.floor(math.log10(step) + 1e-9)
    if value == 0:
        return "0"
    if 1e-3 <= largest < 1e6:
        return f"{value:,.{max(0, -exponent)}f}"
    digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - exponent)
    return _without_zeros(f"{value:.{digits}e}")


def _short(value: float) -> str:
    return f"{value:,.10g}" if 1e-3 < value < 1e6 else _without_zeros(f"{value:.0e}")


def _without_zeros(text: str) -> str:
    """Write `2e-5` for `2e-05`, and `1e6` for `1e+06`."""
    digits, _, exponent = text.partition("e")
    return f"{digits}e{int(exponent)}"
