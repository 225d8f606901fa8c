"""Charts: well-formed, named, escaped; gaps, crosses, arrows, and the side on which a margin lies."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from support.reports import SCRIPT

from lightning_amp.compare.views._svg import (
    CONTROL_STYLE,
    WIDTH,
    XY,
    Axis,
    Interval,
    Line,
    axis_from_zero,
    axis_of,
    forest,
    line_chart,
    swatch,
)

X, Y = axis_from_zero([10.0]), axis_of([0.0, 1.0])


def chart(*lines: Line, x: Axis = X, y: Axis = Y, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(lines, x, y, title=title, x_label="steps"))


def points(*ys: float) -> list[XY]:
    return [XY(float(i), y) for i, y in enumerate(ys)]


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if name in element.get("class", "").split()]


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("text")]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))


# -- curves ------------------------------------------------------------------------------------------------------------


def test_a_chart_has_a_name() -> None:
    svg = chart(title=f'{SCRIPT} & "quotes"')
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == svg[0].text == f'{SCRIPT} & "quotes"'
    assert svg[0].tag == "title"


def test_what_users_name_is_escaped() -> None:
    text = line_chart([Line(SCRIPT, "arm-1", [], points(0.1, 0.2))], X, Y, title=SCRIPT, x_label=SCRIPT)
    assert "<script" not in text
    assert ElementTree.fromstring(text) is not None


def test_seeds_lie_below_means() -> None:
    svg = chart(*(Line(n, f"arm-{n}", [points(0.1, 0.2)] * 3, points(0.1, 0.2)) for n in "12"))
    kinds = [element.get("class") for element in svg.iter("path") if element.get("class") in ("seed", "mean")]
    assert kinds == ["seed"] * 6 + ["mean"] * 2
    assert [group.get("class") for group in svg.iter("g")] == ["arm-1", "arm-2"] * 2
    assert of_class(svg, "crowded") == []


def test_many_thin_lines_are_paler() -> None:
    assert of_class(chart(Line("", "arm-1", [points(0.1, 0.2)] * 13)), "crowded")


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    (path,) = of_class(chart(Line("", "arm-1", [], points(0.1, 0.2, math.nan, 0.3, 0.4))), "mean")
    assert path.get("d", "").count("M") == 2
    assert "dots" not in path.get("class", "")
    (path,) = of_class(chart(Line("", "arm-1", [], points(0.1, math.inf, 0.3, 0.4))), "mean")
    assert path.get("d", "").count("M") == 2
    assert "dots" in path.get("class", "")


def test_a_single_point_is_a_dot() -> None:
    (path,) = of_class(chart(Line("", "arm-1", [], points(0.5))), "mean")
    assert path.get("class") == "mean dots"
    assert path.get("d", "").endswith("h0")


def test_higher_values_are_higher_up() -> None:
    (path,) = of_class(chart(Line("", "arm-1", [], points(0.0, 1.0))), "mean")
    x1, y1, x2, y2 = map(float, re.findall(r"[\d.]+", path.get("d", "")))
    assert x1 < x2
    assert y1 > y2


def test_an_empty_chart_says_so() -> None:
    assert "no finite values" in texts(chart(Line("", "arm-1", [points(math.nan)], points(math.nan))))
    assert "no finite values" in texts(chart())
    assert "no finite values" not in texts(chart(Line("", "arm-1", [], points(0.1))))


def test_crosses_on_each_other_are_one() -> None:
    marks = [XY(5.0, 0.5), XY(5.001, 0.5), XY(9.0, 0.5), XY(3.0, math.nan)]
    (crosses,) = of_class(chart(Line("", "arm-1", [], points(0.1, 0.2), marks)), "cross")
    assert crosses.get("d", "").count("l6 6") == 2


def test_values_beyond_the_axis_are_mentioned() -> None:
    axis = axis_of([*(i / 100 for i in range(100)), -1e9])
    assert "some values lie beyond the axis" in texts(chart(y=axis))
    assert "some values lie beyond the axis" not in texts(chart())


def test_labels_stay_inside() -> None:
    svg = chart(x=axis_from_zero([4000.0]))
    (last,) = [element for element in svg.iter("text") if element.text == "4,000"]
    assert (number(last, "x"), last.get("text-anchor")) == (WIDTH, "end")


def test_a_swatch_is_decoration() -> None:
    svg = ElementTree.fromstring(swatch("arm-3"))
    assert svg.get("aria-hidden") == "true"
    assert "arm-3" in svg.get("class", "").split()


# -- differences -------------------------------------------------------------------------------------------------------


def row(
    mean: float,
    low: float | None = None,
    high: float | None = None,
    *,
    seeds: Sequence[float] = (),
    style: str = "arm-1",
) -> Interval:
    return Interval("fp16", style, f"{mean:+g}", f"{mean:+g} (...)", mean, low, high, seeds)


def differences(
    *rows: Interval, margin: float | None = None, direction: str | None = "min", title: str = ""
) -> ElementTree.Element:
    return ElementTree.fromstring(forest(rows, title=title, margin=margin, direction=direction))


def x_of(svg: ElementTree.Element, name: str) -> float:
    element = of_class(svg, name)[0]
    return float(element.get("cx") or re.findall(r"[\d.]+", element.get("d", ""))[0])


@pytest.mark.parametrize(("direction", "cost"), [("min", 0.01), ("max", -0.01)])
def test_the_margin_lies_where_it_costs(direction: str, cost: float) -> None:
    svg = differences(row(2 * cost), margin=0.01, direction=direction)
    zero, margin, dot = x_of(svg, "zero"), x_of(svg, "margin"), x_of(svg, "dot")
    assert zero < margin < dot if direction == "min" else dot < margin < zero
    (shaded,) = of_class(svg, "too-much")
    assert number(shaded, "x") <= dot <= number(shaded, "x") + number(shaded, "width")
    assert not number(shaded, "x") <= zero <= number(shaded, "x") + number(shaded, "width")
    assert "margin 0.01" in texts(svg)
    words = [text for text in texts(svg) if "worse" in text]
    assert words == (["worse →"] if direction == "min" else ["← worse"])


def test_a_margin_of_zero_shades_one_side() -> None:
    for direction in ("min", "max"):
        svg = differences(row(0.5, -1.0, 2.0), margin=0.0, direction=direction)
        (shaded,) = of_class(svg, "too-much")
        start, width = number(shaded, "x"), number(shaded, "width")
        assert x_of(svg, "zero") == pytest.approx(start if direction == "min" else start + width)


def test_without_margin_or_direction_nothing_is_shaded() -> None:
    for margin, direction in ((None, "min"), (0.1, None)):
        assert of_class(differences(row(0.1), margin=margin, direction=direction), "too-much") == []
    assert not any("better" in text for text in texts(differences(row(0.1), direction=None)))


def test_an_interval_with_its_seeds() -> None:
    svg = differences(row(0.1, 0.05, 0.15, seeds=[0.07, 0.13]))
    assert len(of_class(svg, "interval")) == 3
    assert len(of_class(svg, "seed-dot")) == 2
    assert len(of_class(svg, "dot")) == 1
    assert of_class(differences(row(0.1, seeds=[0.1])), "interval") == []


def test_what_is_not_finite_has_no_dot() -> None:
    svg = differences(row(math.nan, math.nan, math.nan, seeds=[math.nan, 0.1]), row(math.inf), margin=0.1)
    assert of_class(svg, "dot") == of_class(svg, "interval") == []
    assert len(of_class(svg, "seed-dot")) == 1


def test_a_diverged_arm_leaves_with_an_arrow() -> None:
    near = row(0.01, 0.005, 0.015)
    svg = differences(near, row(1e9, 0.9e9, 1.1e9, seeds=[1e9]), row(0.002, style=CONTROL_STYLE), margin=0.02)
    assert of_class(svg, "arrow")
    first, last = (number(of_class(svg, "dot")[i], "cx") for i in (0, -1))
    assert first - last > 10
    assert of_class(differences(near, row(0.1), margin=0.02), "arrow") == []
    assert of_class(differences(near, row(1e9), margin=None), "arrow") == []  # nothing says what is far


def test_the_nearest_arm_is_always_in_the_picture() -> None:
    svg = differences(row(5.0, 4.0, 6.0), margin=0.01)
    assert of_class(svg, "arrow") == []
    assert len(of_class(svg, "dot")) == 1


def test_long_names_are_cut_and_told_in_full() -> None:
    long = row(0.1)._replace(label="a very long name " * 9)
    svg = differences(long)
    (label,) = of_class(svg, "label")
    assert (label.text or "").endswith("…")
    assert len(label.text or "") < 60
    assert any(long.label in (title.text or "") for title in svg.iter("title"))
    wide = of_class(differences(row(0.1)._replace(label="半" * 60)), "label")[0].text or ""
    assert len(wide) < len(label.text or "") * 0.7
    assert of_class(differences(row(0.1)), "label")[0].text == "fp16"
