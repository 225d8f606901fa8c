"""Plain data for JSON, and tables in Markdown."""

from __future__ import annotations

from math import inf, nan

from lightning_amp._plain_data import Table, line, null, plain


def test_numbers_that_are_not_finite() -> None:
    value = {"a": (nan, -inf, 1.0), 2: [None, "x"]}
    assert plain(value) == {"a": ["nan", "-inf", 1.0], "2": [None, "x"]}
    assert plain(value, null) == {"a": [None, None, 1.0], "2": [None, "x"]}


def test_a_line_holds_no_html() -> None:
    assert line("a | b\n<c> < 3 <-") == "a | b \\<c> < 3 <-"


def test_a_cell_is_one_line_and_ends_where_it_should() -> None:
    assert str(Table(["a"], [["x | y\n<c> \\|"]])) == "| a |\n| --- |\n| x \\| y \\<c> \\\\\\| |"


def test_the_rule_of_a_table() -> None:
    assert str(Table(["a", "b"], [["1", "2"]], ["---", "--:"])) == "| a | b |\n| --- | --: |\n| 1 | 2 |"
