"""Draw charts as inline SVG: axes, curves and differences.

Colours, dashes and fonts are in the style sheet of the page, by class. Names that users chose are escaped here.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from lightning_amp.compare._statistics import Direction

WIDTH = 420
"""Width of every chart, in units of the SVG; the page scales it."""

CONTROL_STYLE = "arm-control"

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 38
_ROW = 44
"""Height of a row of a forest plot: a line of text, and the strip below it."""

_LETTER, _BOLD = 7.6, 8.8
"""Assumed widths of a letter in a wide font, to keep texts from overlapping."""

_FAR = 40
"""A difference is drawn outside of the axis if it is this many times the margin, or the control's difference."""

_CROWDED = 12
"""If there are more thin lines than this, all of them are drawn paler."""

_LARGEST = 1e250
"""Larger values are not drawn, because their differences and powers may overflow."""

_LOG_FROM = 30
"""From this ratio of the largest to the smallest value on, the axis is logarithmic."""

_CUT_FROM = 50
"""From this ratio of the range of all values to the range of nine tenths of them on, the axis is cut."""

_LEAST_SPAN = 1e-3
"""Least relative span of an axis: a shorter axis would show rounding, with labels that are hard to read."""


class XY(NamedTuple):
    """A point of a chart; NaN as `y` is a gap."""

    x: float
    y: float


class Line(NamedTuple):
    """One arm in a chart: a thin line for each seed, a thick line for their mean, and crosses.

    `style` is the class of the arm in the style sheet: `"arm-1"`.
    """

    label: str
    style: str
    seeds: Sequence[Sequence[XY]]
    mean: Sequence[XY] = ()
    marks: Sequence[XY] = ()


# -- curves ------------------------------------------------------------------------------------------------------------


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, *, title: str, x_label: str, height: int = 215) -> str:
    """Draw curves, the last one on top. A value that is not finite is a gap; a value between two gaps is a dot.

    A screen reader reads the title.
    """
    right, bottom = WIDTH - _RIGHT, height - _BOTTOM

    def at(point: XY) -> tuple[float, float]:
        return _LEFT + x.place(point.x) * (right - _LEFT), bottom - y.place(point.y) * (bottom - _TOP)

    parts: list[str] = []
    for tick in y.ticks:
        level = bottom - y.place(tick.value) * (bottom - _TOP)
        parts.append(_line("grid-line", _LEFT, level, right, level))
        parts.append(_text("tick", _LEFT - 6, level + 4, tick.label, "end"))
    parts += _x_axis(x, _LEFT, right, bottom)
    parts.append(_text("tick", right, bottom + 33, x_label, "end"))
    if y.is_cut:
        parts.append(_text("tick", _LEFT + 4, bottom + 33, "some values lie beyond the axis"))
    groups = [_group(line, line.seeds, "seed", (), at) for line in lines]  # below all means
    groups += [_group(line, [line.mean], "mean", line.marks, at) for line in lines]
    if not any(groups):
        parts.append(_text("tick", (_LEFT + right) / 2, (_TOP + bottom) / 2, "no finite values", "middle"))
    crowded = " crowded" if sum(len(line.seeds) for line in lines) > _CROWDED else ""
    return _svg(height, title, [*parts, *groups], kind=f"chart{crowded}")


def _group(
    line: Line, curves: Sequence[Sequence[XY]], kind: str, marks: Sequence[XY], at: Callable[[XY], tuple[float, float]]
) -> str:
    """Draw lines and crosses of one arm; nothing if none of the values can be drawn."""
    pieces: list[list[str]] = []
    for points in curves:
        pieces.append([])
        for point in points:
            if can_be_drawn(point.y):
                pieces[-1].append(" ".join(map(_n, at(point))))
            else:
                pieces.append([])
    places = dict.fromkeys(tuple(map(round, at(mark))) for mark in marks if can_be_drawn(mark.y))
    paths = {
        kind: [f"M{' '.join(piece)}" for piece in pieces if len(piece) > 1],
        f"{kind} dots": [f"M{piece[0]}h0" for piece in pieces if len(piece) == 1],
        "cross": [f"M{x - 3} {y - 3}l6 6m0-6l-6 6" for x, y in places],
    }
    inner = "".join(f'<path class="{name}" d="{"".join(parts)}"/>' for name, parts in paths.items() if parts)
    return f'<g class="{line.style}"><title>{escape(line.label)}</title>{inner}</g>' if inner else ""


def swatch(style: str) -> str:
    """Draw a sample of an arm's line for the legend; screen readers skip it."""
    path = '<path class="mean" d="M1 5H31"/>'
    return f'<svg class="swatch {style}" viewBox="0 0 32 10" width="32" height="10" aria-hidden="true">{path}</svg>'


# -- differences -------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A row of a forest plot: one arm's mean difference, its interval, and the difference of each seed.

    `number` is the mean as text, which is printed next to the label. `text` is for a screen reader.
    """

    label: str
    style: str
    number: str
    text: str
    mean: float
    bounds: tuple[float, float] | None
    seeds: Sequence[float]

    @property
    def ends(self) -> list[float]:
        """Return the mean and the bounds, as far as they can be drawn."""
        return [value for value in (self.mean, *(self.bounds or ())) if can_be_drawn(value)]


def forest(rows: Sequence[Interval], *, title: str, margin: float | None, direction: Direction | None) -> str:
    """Draw differences to the reference: a dot and its interval for each arm, faint dots for the seeds.

    Costs beyond the margin are shaded. A difference much larger than the margin and the control is drawn as an arrow at
    the edge, so that the other differences stay distinguishable. A screen reader reads the title.
    """
    left, right, top = 4, WIDTH - 4, 16 if margin is not None else 2
    bottom = top + _ROW * len(rows)
    costly = None if margin is None or direction is None else margin if direction == "min" else -margin
    limit = _limit(rows, margin)
    shown = [v for row in rows for v in (*row.ends, *row.seeds) if can_be_drawn(v) and abs(v) <= limit]
    axis = axis_around_zero(shown if costly is None else [*shown, 1.2 * costly])

    def place(value: float) -> float:
        return left + axis.place(value) * (right - left)

    parts = _x_axis(axis, left, right, bottom)
    if costly is not None:
        anchor = "end" if place(costly) > WIDTH / 2 else "start"
        parts.append(_text("tick", place(costly), top - 4, f"margin {margin:g}", anchor))
    if direction is not None:
        words = ("better", "worse") if direction == "min" else ("worse", "better")
        parts.append(_text("tick", left, bottom + 33, f"\N{LEFTWARDS ARROW} {words[0]}"))
        parts.append(_text("tick", right, bottom + 33, f"{words[1]} \N{RIGHTWARDS ARROW}", "end"))
    for i, row in enumerate(rows):
        y = top + _ROW * i
        label = _fit(row.label, right - left - _LETTER * (len(row.number) + 2))
        parts.append(_text("label", left, y + 15, label))
        parts.append(_text("number", right, y + 15, row.number, "end"))
        parts.append(_rectangle("strip", left, y + 21, right - left))
        if costly is not None:
            x = place(costly)
            start, end = (x, right) if direction == "min" else (left, x)
            parts.append(_rectangle("too-much", start, y + 21, end - start))
            parts.append(_line("margin", x, y + 21, x, y + 41))
        parts.append(_line("zero", place(0.0), y + 21, place(0.0), y + 41))
        parts.append(_row(row, axis, place, y + 31))
    return _svg(bottom + _BOTTOM, title, parts)


def _limit(rows: Sequence[Interval], margin: float | None) -> float:
    """Return the largest difference in the picture; infinite if there is neither a margin nor a control."""
    extents = [(row.style == CONTROL_STYLE, max(map(abs, row.ends), default=0.0)) for row in rows]
    usual = max([margin or 0.0, *(extent for is_control, extent in extents if is_control)])
    nearest = min((extent for is_control, extent in extents if not is_control), default=0.0)
    return max(_FAR * usual, nearest) if usual > 0 else math.inf


def _row(row: Interval, axis: Axis, place: Callable[[float], float], level: float) -> str:
    """Draw the seeds, the interval and the mean of an arm; an arrow marks a value beyond the axis."""

    def point(value: float, tip: float, inside: str) -> str:
        arrow = f'<path class="arrow" d="M{_n(place(value) + tip)} {_n(level)}l{_n(-2 * tip)} -5v10z"/>'
        return inside if axis.low <= value <= axis.high else arrow

    parts = [_circle("seed-dot", place(value), level, 3) for value in row.seeds if axis.low <= value <= axis.high]
    if row.bounds is not None and all(map(can_be_drawn, row.bounds)):
        low, high = map(place, row.bounds)
        parts.append(_line("interval", low, level, high, level))
        parts.append(point(row.bounds[0], -4, _line("interval", low, level - 4, low, level + 4)))
        parts.append(point(row.bounds[1], 4, _line("interval", high, level - 4, high, level + 4)))
    if can_be_drawn(row.mean):
        parts.append(point(row.mean, 4 if row.mean > 0 else -4, _circle("dot", place(row.mean), level, 4.5)))
    return f'<g class="{row.style}"><title>{escape(f"{row.label}: {row.text}")}</title>{"".join(parts)}</g>'


# -- pieces ------------------------------------------------------------------------------------------------------------


def _svg(height: float, title: str, parts: Iterable[str], *, kind: str = "chart") -> str:
    text = escape(title)
    start = f'<svg class="{kind}" role="img" aria-label="{text}" viewBox="0 0 {WIDTH} {_n(height)}">'
    return f"{start}<title>{text}</title>{''.join(parts)}</svg>"


def _x_axis(axis: Axis, left: float, right: float, y: float) -> list[str]:
    """Draw a line and ticks with their labels, which stay inside of the picture."""
    parts = [_line("axis", left, y, right, y)]
    for tick in axis.ticks:
        x = left + axis.place(tick.value) * (right - left)
        half = _LETTER * len(tick.label) / 2
        at, anchor = (0, "start") if x < half else (WIDTH, "end") if x > WIDTH - half else (x, "middle")
        parts.append(_line("axis", x, y, x, y + 4))
        parts.append(_text("tick", at, y + 17, tick.label, anchor))
    return parts


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{kind}" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"/>'


def _circle(kind: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>'


def _rectangle(kind: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="20"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(text)}</text>'


def _fit(text: str, width: float) -> str:
    """Cut a text that is probably wider than its space."""
    room = width
    for i, character in enumerate(text):
        room -= _BOLD * (2 if unicodedata.east_asian_width(character) in "WF" else 1)
        if room < 0:
            return f"{text[: max(1, i - 1)]}\N{HORIZONTAL ELLIPSIS}"
    return text


def _n(value: float) -> str:
    """Write a coordinate with one decimal."""
    return f"{value:.1f}".removesuffix(".0")


# -- axes --------------------------------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """A number on an axis, and its label."""

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
        """Return the place of a value, from 0 at `low` to 1 at `high`; values beyond an end are drawn at that end."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def can_be_drawn(value: float) -> bool:
    """Return whether a value can be drawn on an axis: it is finite, and not so large that an axis overflows."""
    return abs(value) < _LARGEST


def axis_of(values: Iterable[float], *, may_be_log: bool = False) -> Axis:
    """Return an axis on which all values have a place, with a little room at both ends.

    It is logarithmic if all values are positive and differ by a factor of 30 or more. Otherwise, values that are
    far from nine tenths of all values lie beyond its ends. Without values the axis goes from 0 to 1.
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
    return _linear_axis(low - room, high + room)._replace(is_cut=is_cut)


def axis_from_zero(values: Iterable[float], *, whole: bool = False) -> Axis:
    """Return an axis from 0 to the largest value; `whole` is for steps, which are whole numbers."""
    high = max(_drawn(values), default=0.0)
    return _linear_axis(0.0, high if high > 0 else 1.0, least_step=1.0 if whole else 0.0)


def axis_around_zero(values: Iterable[float]) -> Axis:
    """Return an axis for differences: all values, and 0, with room at both ends."""
    found = [0.0, *_drawn(values)]
    low, high = min(found), max(found)
    room = 0.06 * (high - low)
    return _linear_axis(-1.0, 1.0) if low == high else _linear_axis(low - room, high + room)


def axis_of_exponents(exponents: Iterable[float]) -> Axis:
    """Return an axis for binary logarithms, whose labels are the powers: `2**16`."""
    found = _drawn(exponents) or [0.0]
    low, high = math.floor(min(found)) - 1, math.ceil(max(found)) + 1
    step = max(1, math.ceil((high - low) / 6))
    return Axis(low, high, tuple(Tick(value, f"2**{value}") for value in range(low + 1, high, step)))


def _drawn(values: Iterable[float]) -> list[float]:
    """Return the values that can be drawn; values too small for a power of ten become 0."""
    return [value if abs(value) > 1 / _LARGEST else 0.0 for value in values if can_be_drawn(value)]


def _linear_axis(low: float, high: float, *, least_step: float = 0.0) -> Axis:
    raw = max((high - low) / 6, least_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(Tick(i * step, _label(i * step)) for i in range(first, last + 1)))


def _log_axis(low: float, high: float) -> Axis:
    """Return an axis between two powers of ten."""
    if high - low < 3:
        values = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high)) for factor in (1, 2, 5)]
    else:
        powers = range(math.ceil(low), math.floor(high) + 1)
        values = [10.0**power for power in powers[:: math.ceil(len(powers) / 6)]]
    ticks = [Tick(value, _label(value)) for value in values if low <= math.log10(value) <= high]
    return Axis(10.0**low, 10.0**high, tuple(ticks), is_log=True)


def _label(value: float) -> str:
    """Write a tick: `0.312`, `10,000`, `2e-5`, `1e6`."""
    digits, _, exponent = f"{value:,.6g}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits
