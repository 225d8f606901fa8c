from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lightning_amp._plain_data import plain
from lightning_amp.compare import _fields

GOOD: list[tuple[Callable[[Any], Any], list[Any]]] = [
    (_fields.text, ["", "a\udcff"]),
    (_fields.boolean, [True, False]),
    (_fields.integer, [-3, 0, 10**30]),
    (_fields.count, [0, 10**30]),
    (_fields.number, [0, -1, 1.5, 2**900]),
    (_fields.choice("a", "b"), ["a", "b"]),
    (_fields.optional(_fields.text), [None, "x"]),
    (_fields.by_name(_fields.count), [{}, {"a": 1}]),
]
BAD: list[tuple[Callable[[Any], Any], list[Any]]] = [
    (_fields.text, [None, 1, b"x", ["x"], {}]),
    (_fields.boolean, [None, 0, 1, "true"]),
    (_fields.integer, [None, True, 1.0, "1", math.inf]),
    (_fields.count, [-1, False]),
    (_fields.number, [None, True, "1.5", "Infinity", "NaN", "", [1], {}, 10**400]),
    (_fields.choice("a", "b"), [None, "c", "", ["a"], {}]),
    (_fields.optional(_fields.text), [0, False]),
    (_fields.by_name(_fields.count), [None, [], "ab", [["a", 1]], {"a": -1}, {1: 1}]),
    (_fields.several(_fields.count), [None, {}, "12", 3, [1, -1], [[1]]]),
    (_fields.row(_fields.text, _fields.count), [None, "ab", [], ["a"], ["a", 1, 1], [1, "a"], {"a": 1, "b": 1}]),
]


@pytest.mark.parametrize(("reader", "values"), GOOD)
def test_what_is_read_is_what_was_written(reader: Callable[[Any], Any], values: list[Any]) -> None:
    for value in values:
        assert reader(json.loads(json.dumps(plain(value)))) == value


@pytest.mark.parametrize(("reader", "values"), BAD)
def test_anything_else_is_refused(reader: Callable[[Any], Any], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=r" is (no|none|neither|negative)\b"):
            reader(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, sys.float_info.max, 0.1 + 0.2])
def test_every_float_survives(value: float) -> None:
    text = json.dumps(plain(value), allow_nan=False)
    found = _fields.number(json.loads(text))
    assert found == value or (math.isnan(found) and math.isnan(value))
    assert math.copysign(1, found) == math.copysign(1, value)


def test_numbers_become_floats_and_lists_tuples() -> None:
    assert type(_fields.number(3)) is float
    assert _fields.several(_fields.number)([1, "nan", 2.5])[::2] == (1.0, 2.5)
    assert _fields.row(_fields.text, _fields.count)(["a", 1]) == ("a", 1)


def test_plain_data_goes_to_the_bottom() -> None:
    deep = {"a": ({"b": [math.nan, (1.0, -math.inf)]},), 3: None}
    assert plain(deep) == {"a": [{"b": ["nan", [1.0, "-inf"]]}], "3": None}


READERS: dict[str, _fields.Reader[Any]] = {"name": _fields.text, "sizes": _fields.several(_fields.count)}


def test_fields_of_a_newer_file_are_left_out() -> None:
    assert _fields.read("a thing", READERS, {"name": "x", "sizes": [1], "colour": 3}) == {"name": "x", "sizes": (1,)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "this is not a thing: None has no `name`, `sizes`"),
        ([], "has no `name`, `sizes`"),
        ("name sizes", "has no `name`, `sizes`"),
        ({"name": "x"}, "has no `sizes`"),
        ({"name": 3, "sizes": []}, "this is not a thing: its `name`: 3 is no text"),
        ({"name": "x", "sizes": [1, -1]}, "its `sizes`: -1 is negative"),
    ],
)
def test_a_torn_file_is_told_by_its_field(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _fields.read("a thing", READERS, data)


def test_a_message_stays_short() -> None:
    for data in ({"name": ["x"] * 10_000, "sizes": []}, {"name": "x" * 10_000}):
        with pytest.raises(ValueError) as caught:
            _fields.read("a thing", READERS, data)
        assert len(str(caught.value)) < 200
