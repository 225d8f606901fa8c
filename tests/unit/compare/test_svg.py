"""Charts as SVG: well-formed, named and escaped, with a place for every value, and labels that tell ticks apart."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import SCRIPT

from lightning_amp.compare.views._svg import (
    CONTROL_STYLE,
    WIDTH,
    XY,
    Axis,
    Interval,
    Line,
    axis_around_zero,
    axis_from_zero,
    axis_of,
    axis_of_exponents,
    can_be_drawn,
    forest,
    line_chart,
    swatch,
)

X, Y = axis_from_zero([10.0]), axis_of([0.0, 1.0])


def chart(*lines: Line, x: Axis = X, y: Axis = Y, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(lines, x, y, title=title, x_label=title))


def line(*ys: float, marks: Sequence[XY] = (), label: str = "") -> Line:
    return Line(label, "arm-1", [], [XY(float(i), y) for i, y in enumerate(ys)], marks)


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if name in element.get("class", "").split()]


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("text")]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))


# -- curves ------------------------------------------------------------------------------------------------------------


def test_a_chart_has_a_name_and_escapes_it() -> None:
    svg = chart(line(0.1, 0.2, label=SCRIPT), title=f'{SCRIPT} & "quotes"')
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == svg[0].text == f'{SCRIPT} & "quotes"'
    assert svg[0].tag == "title"


def test_seeds_lie_below_means() -> None:
    points = line(0.1, 0.2).mean
    svg = chart(*(Line(n, f"arm-{n}", [points] * 3, points) for n in "12"))
    assert [element.get("class") for element in svg.iter("path")][-4:] == ["seed"] * 2 + ["mean"] * 2
    assert [group.get("class") for group in svg.iter("g")] == ["arm-1", "arm-2"] * 2
    assert of_class(svg, "crowded") == []
    assert of_class(chart(Line("", "arm-1", [points] * 13)), "crowded")


@pytest.mark.parametrize(
    ("values", "num_lines", "num_dots"),
    [((0.1, 0.2, math.nan, 0.3, 0.4), 2, 0), ((0.1, math.inf, 0.3, 0.4), 1, 1), ((0.5,), 0, 1)],
)
def test_a_value_that_is_not_finite_is_a_gap_and_a_single_one_a_dot(
    values: tuple[float, ...], num_lines: int, num_dots: int
) -> None:
    paths = of_class(chart(line(*values)), "mean")
    drawn = {path.get("class"): path.get("d", "").count("M") for path in paths}
    assert (drawn.get("mean", 0), drawn.get("mean dots", 0)) == (num_lines, num_dots)


def test_higher_values_are_higher_up() -> None:
    (path,) = of_class(chart(line(0.0, 1.0)), "mean")
    x1, y1, x2, y2 = map(float, re.findall(r"[\d.]+", path.get("d", "")))
    assert x1 < x2
    assert y1 > y2


def test_an_empty_chart_says_so() -> None:
    assert "no finite values" in texts(chart(line(math.nan)))
    assert "no finite values" in texts(chart())
    assert "no finite values" not in texts(chart(line(0.1)))


def test_crosses_on_each_other_are_one() -> None:
    marks = [XY(5.0, 0.5), XY(5.001, 0.5), XY(9.0, 0.5), XY(3.0, math.nan)]
    (crosses,) = of_class(chart(line(0.1, 0.2, marks=marks)), "cross")
    assert crosses.get("d", "").count("l6 6") == 2


def test_a_cut_axis_says_so() -> None:
    cut = axis_of([*(i / 100 for i in range(100)), 1e9])
    assert "some values lie beyond the axis" in texts(chart(line(1e9), y=cut))
    assert "some values lie beyond the axis" not in texts(chart(line(0.1)))


def test_labels_stay_inside() -> None:
    svg = chart(x=axis_from_zero([4000.0]))
    (last,) = [element for element in svg.iter("text") if element.text == "4,000"]
    assert (number(last, "x"), last.get("text-anchor")) == (WIDTH, "end")


def test_a_swatch_is_decoration() -> None:
    assert ElementTree.fromstring(swatch("arm-1")).get("aria-hidden") == "true"


# -- differences -------------------------------------------------------------------------------------------------------


def row(
    mean: float, bounds: tuple[float, float] | None = None, seeds: Sequence[float] = (), style: str = "arm-2"
) -> Interval:
    return Interval("fp16", style, f"{mean:+g}", f"{mean:+g} in words", mean, bounds, seeds)


def differences(*rows: Interval, margin: float | None = 0.02, direction: str | None = "min") -> ElementTree.Element:
    return ElementTree.fromstring(forest(rows, title="a title", margin=margin, direction=direction))


def x_of(svg: ElementTree.Element, kind: str) -> float:
    return float(re.findall(r"[\d.]+", of_class(svg, kind)[0].get("d", ""))[0])


@pytest.mark.parametrize(("direction", "mean"), [("min", 0.1), ("max", -0.1)])
def test_a_cost_beyond_the_margin_is_shaded(direction: str, mean: float) -> None:
    svg = differences(row(mean), margin=0.01, direction=direction)
    (shaded,) = of_class(svg, "too-much")
    dot, zero = number(of_class(svg, "dot")[0], "cx"), x_of(svg, "zero")
    assert number(shaded, "x") <= dot <= number(shaded, "x") + number(shaded, "width")
    assert not number(shaded, "x") <= zero <= number(shaded, "x") + number(shaded, "width")
    assert "margin 0.01" in texts(svg)
    words = [text for text in texts(svg) if "worse" in text]
    assert words == (["worse →"] if direction == "min" else ["← worse"])


@pytest.mark.parametrize("direction", ["min", "max"])
def test_a_margin_of_zero_shades_one_side(direction: str) -> None:
    svg = differences(row(0.5, (-1.0, 2.0)), margin=0.0, direction=direction)
    (shaded,) = of_class(svg, "too-much")
    start, width = number(shaded, "x"), number(shaded, "width")
    assert x_of(svg, "zero") == pytest.approx(start if direction == "min" else start + width)


def test_without_margin_or_direction_nothing_is_shaded() -> None:
    for margin, direction in ((None, "min"), (0.1, None)):
        assert of_class(differences(row(0.1), margin=margin, direction=direction), "too-much") == []
    assert not any("better" in text for text in texts(differences(row(0.1), direction=None)))


def test_an_interval_with_its_seeds() -> None:
    svg = differences(row(0.1, (0.05, 0.15), seeds=[0.07, 0.13]))
    assert [len(of_class(svg, kind)) for kind in ("interval", "seed-dot", "dot")] == [3, 2, 1]
    assert of_class(differences(row(0.1, seeds=[0.1])), "interval") == []


def test_a_difference_that_is_not_finite_has_no_dot() -> None:
    svg = differences(row(math.nan, (math.nan, math.nan), seeds=[math.nan, 0.1]), row(math.inf), margin=0.1)
    assert of_class(svg, "dot") == of_class(svg, "interval") == []
    assert len(of_class(svg, "seed-dot")) == 1


def test_a_diverged_arm_leaves_with_an_arrow() -> None:
    near = row(0.01, (0.005, 0.015))
    svg = differences(near, row(1e9, (0.9e9, 1.1e9), seeds=[1e9]), row(0.002, style=CONTROL_STYLE))
    assert of_class(svg, "arrow")
    first, last = (number(of_class(svg, "dot")[i], "cx") for i in (0, -1))
    assert first - last > 10
    assert of_class(differences(near, row(0.1)), "arrow") == []
    assert of_class(differences(near, row(1e9), margin=None), "arrow") == []  # nothing says which difference is large
    assert of_class(differences(row(5.0, (4.0, 6.0)), margin=0.01), "arrow") == []  # the nearest arm is always shown


def test_long_names_are_cut_and_told_in_full() -> None:
    long = row(0.1)._replace(label="a very long name " * 9)
    svg = differences(long)
    label = of_class(svg, "label")[0].text or ""
    assert label.endswith("…")
    assert len(label) < 60
    assert any(long.label in (title.text or "") for title in svg.iter("title"))
    wide = of_class(differences(row(0.1)._replace(label="半" * 60)), "label")[0].text or ""
    assert len(wide) < len(label) * 0.7
    assert of_class(differences(row(0.1)), "label")[0].text == "fp16"


# -- axes --------------------------------------------------------------------------------------------------------------

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
    assert all(label.startswith("2**") for label in labels(axis))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.31, 0.32], ["0.31", "0.312", "0.314", "0.316", "0.318", "0.32"]),
        ([0.0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([-3.0, 40_000.0], ["0", "10,000", "20,000", "30,000", "40,000"]),
        ([0.0, 4e-5], ["0", "1e-5", "2e-5", "3e-5", "4e-5"]),
        ([0.0, 2.5e7], ["0", "5e6", "1e7", "1.5e7", "2e7", "2.5e7"]),
    ],
)
def test_labels(values: list[float], expected: list[str]) -> None:
    assert labels(axis_of(values)) == expected


def test_equal_values_are_in_the_middle() -> None:
    for value in (0.0, 0.93, -4e5):
        axis = axis_of([value, value])
        assert axis.place(value) == pytest.approx(0.5)
        assert_sound(axis)
    nearly = axis_of([0.9, 0.9 + 1e-12])
    assert nearly.high - nearly.low > 5e-4


def test_a_wide_range_of_positive_values_is_logarithmic() -> None:
    assert labels(axis_of([0.05, 2.0], may_be_log=True)) == ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert labels(axis_of([1e-4, 1e7], may_be_log=True)) == ["0.0001", "0.01", "1", "100", "10,000", "1e6"]
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
