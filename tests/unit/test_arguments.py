from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_amp._arguments import (
    is_count,
    is_number,
    require,
    require_bool,
    require_choice,
    require_count,
)


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError, match=r"^`\w+` must be ") as caught:
        function("name", *args, **kwargs)
    return str(caught.value)


def test_rule_value_and_next_step() -> None:
    assert require(True, "name", "a rule", 3) is None
    message = refusal(lambda name: require(False, name, "above 0", 2.0**16, "Choose another."))
    assert message == "`name` must be above 0, got 2.0**16. Choose another."


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None])
def test_counts(value: Any) -> None:
    assert refusal(require_count, value, 0) == f"`name` must be an integer of 0 or more, got {value!r}."
    assert not is_count(value)
    require_count("name", 0, 0)
    require_count("name", None, none="or `None` for all")
    assert refusal(require_count, 0, none="or `None` for all").endswith("1 or more, or `None` for all; got 0.")


def test_finite_numbers() -> None:
    assert is_number(3)
    assert is_number(math.inf, finite=False)
    assert not any(map(is_number, (math.inf, math.nan, False, "3", None)))


def test_choices() -> None:
    require_bool("name", False)
    assert refusal(require_bool, 1) == "`name` must be `True` or `False`, got 1."
    require_choice("name", "a", ("a", "b"))
    assert refusal(require_choice, 4, ("a", "b"), "Or not.") == '`name` must be "a" or "b", got 4. Or not.'
