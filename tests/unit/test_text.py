from __future__ import annotations

import math

import pytest

from lightning_amp._plain_data import Table, line, null, plain
from lightning_amp._text import counted, exact, listed, literal, named, percent, rounded


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0**24, "2**24"), (65536.0, "2**16"), (2048, "2**11"), (1024.0, "1024"), (1.0, "1"), (0.5, "0.5"),
        (0.125, "0.125"), (2.0**-4, "2**-4"), (2.0**-14, "2**-14"), (0.0, "0"), (2000, "2,000"), (65504.0, "65,504"),
        (3e9, "3,000,000,000"), (0.1, "0.1"), (12.5, "12.5"), (1e300, "1e+300"), (-4.0, "-4"), (2.0**-149, "2**-149"),
        (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_exact(value: float, text: str) -> None:
    assert exact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.96812, "0.968"), (65504.0, "65,500"), (999.6, "1,000"), (123.4, "123"), (12.34, "12.3"), (1e5, "100,000"),
        (1.7712e8, "1.77e+08"), (1e-7, "1e-07"), (0.0, "0"), (-2048.0, "-2,050"), (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)  # fmt: skip
def test_rounded(value: float, text: str) -> None:
    assert rounded(value) == text


@pytest.mark.parametrize(
    "value", [2.0**24, 65536.0, 1024.0, 512.0, 0.5, 2.0**-14, 2000, 64, 0.1, 3e9, True, None, 1e-5]
)
def test_a_literal_is_the_value(value: object) -> None:
    assert eval(literal(value)) == value


def test_literals_are_short() -> None:
    assert [literal(v) for v in (2.0**24, 2.0**-14, 0.5, 2000)] == ["2.0**24", "2.0**-14", "0.5", "2000"]


def test_a_few_names_and_how_many_more() -> None:
    assert named(["a", "b", "c"]) == "`a`, `b`, `c`"
    assert named(["a", "b", "c", "d"]) == "`a`, `b`, `c` and 1 more"
    assert listed(["a", "b", "c"], most=1) == "a and 2 more"
    assert [counted(number, "record") for number in (1, 0, 2000)] == ["1 record", "0 records", "2,000 records"]


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (1.0, "100 %"),
        (0.5, "50 %"),
        (0.12345, "12.3 %"),
        (0.99999, "99.9 %"),
        (1e-9, "0.001 %"),
    ],
)
def test_percent(fraction: float, text: str) -> None:
    assert percent(fraction) == text


# -- plain data for JSON, and tables in Markdown -----------------------------------------------------------------------


def test_numbers_that_are_not_finite() -> None:
    value = {"a": (math.nan, -math.inf, 1.0), 2: [None, "x"]}
    assert plain(value) == {"a": ["nan", "-inf", 1.0], "2": [None, "x"]}
    assert plain(value, null) == {"a": [None, None, 1.0], "2": [None, "x"]}


def test_a_line_holds_no_html() -> None:
    assert line("a | b\n<c> < 3 <-") == "a | b \\<c> < 3 <-"


def test_a_cell_is_one_line_and_ends_where_it_should() -> None:
    assert str(Table(["a"], [["x | y\n<c> \\|"]])) == "| a |\n| --- |\n| x \\| y \\<c> \\\\\\| |"


def test_the_rule_of_a_table() -> None:
    assert str(Table(["a", "b"], [["1", "2"]], ["---", "--:"])) == "| a | b |\n| --- | --: |\n| 1 | 2 |"
