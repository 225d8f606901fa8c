"""Read the fields of dataclasses from plain JSON data, each by its type annotation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_amp._text import named

_T = TypeVar("_T")


def read(cls: type[_T], data: object, kind: str) -> _T:
    """Return an object of a dataclass, made from the JSON data of its fields.

    Unknown names are ignored, so that an older version reads a newer file.

    Args:
        cls: The dataclass. Its fields are texts, numbers, literals, dataclasses, and mappings and tuples of them.
        data: The data; NaN and infinities are texts.
        kind: The name of such data in error messages: `"a run of a comparison"`.

    Raises:
        ValueError: If a field is missing or does not fit its type. Integers must be 0 or more.

    """
    hints = _hints(cls)
    missing = [name for name in hints if not isinstance(data, Mapping) or name not in data]
    if not isinstance(data, Mapping) or missing:
        raise ValueError(f"this is not {kind}: {_shown(data)} has no {named(missing)}")
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        try:
            found[name] = _value(data[name], hint)
        except ValueError as error:
            raise ValueError(f"this is not {kind}: its `{name}`: {error}") from error
    return cls(**found)


def _value(value: Any, hint: Any) -> Any:
    """Return a value of an annotated type, made from JSON data; raise a `ValueError` if it does not fit."""
    origin, arguments = get_origin(hint), get_args(hint)
    if type(None) in arguments:  # `X | None`
        return None if value is None else _value(value, arguments[0])
    if isinstance(hint, type) and is_dataclass(hint):
        return read(hint, value, f"a {hint.__name__}")
    if origin is Mapping:
        _require(isinstance(value, Mapping), value, "a mapping")
        return {_value(name, str): _value(item, arguments[1]) for name, item in value.items()}
    if origin is tuple and arguments[-1] is ...:
        _require(isinstance(value, (list, tuple)), value, "a list")
        return tuple(_value(item, arguments[0]) for item in value)
    if origin is tuple or hasattr(hint, "_fields"):  # of a `NamedTuple`
        kinds = arguments or tuple(_hints(hint).values())
        fits = isinstance(value, (list, tuple)) and len(value) == len(kinds)
        _require(fits, value, f"a list of {len(kinds)} values")
        cells = (_value(cell, kind) for cell, kind in zip(value, kinds, strict=True))
        return tuple(cells) if origin is tuple else hint(*cells)
    if origin is Literal:
        _require(value in arguments, value, f"one of {named(arguments)}")
        return value
    return _scalar(value, hint)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _scalar(value: Any, hint: type) -> Any:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        fits = is_integer and abs(value) <= sys.float_info.max
        _require(fits or isinstance(value, float) or value in ("nan", "inf", "-inf"), value, "a number")
    elif hint is int:
        _require(is_integer and value >= 0, value, "an integer of 0 or more")
    else:
        _require(isinstance(value, hint), value, {str: "a text", bool: "true or false"}[hint])
    return hint(value)


def _require(fits: bool, value: object, rule: str) -> None:
    if not fits:
        raise ValueError(f"{_shown(value)} is not {rule}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
