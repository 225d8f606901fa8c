"""The fields of a dataclass as plain data of JSON, and how they are read again, each by its type."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_amp._text import named

_T = TypeVar("_T")
Reader = Callable[[Any], _T]
"""Returns the value of a field, or raises a `ValueError` such as "'x' is no number"."""


def read(kind: str, readers: Mapping[str, Reader[Any]], data: object) -> dict[str, Any]:
    """Return the fields of a dataclass; others than those are left out, so that an older version reads a newer file.

    Args:
        kind: What a person calls it: `"a run of a comparison"`.
        readers: How to read each field.
        data: What was found in a file.

    Raises:
        ValueError: If a field is missing, or is something else.

    """
    if not isinstance(data, Mapping) or not readers.keys() <= data.keys():
        missing = [name for name in readers if not isinstance(data, Mapping) or name not in data]
        raise ValueError(f"this is not {kind}: {_shown(data)} has no {named(missing)}")
    found: dict[str, Any] = {}
    for name, reader in readers.items():
        try:
            found[name] = reader(data[name])
        except ValueError as error:
            raise ValueError(f"this is not {kind}: its `{name}`: {error}") from error
    return found


def text(value: Any) -> str:
    """Read a text."""
    return _checked(value, isinstance(value, str), "is no text")


def boolean(value: Any) -> bool:
    """Read `True` or `False`."""
    return _checked(value, isinstance(value, bool), "is neither true nor false")


def integer(value: Any) -> int:
    """Read an integer."""
    return _checked(value, isinstance(value, int) and not isinstance(value, bool), "is no integer")


def count(value: Any) -> int:
    """Read an integer of 0 or more."""
    return _checked(value, integer(value) >= 0, "is negative")


def number(value: Any) -> float:
    """Read a number that :func:`plain` wrote: `"nan"`, `"inf"`, `"-inf"` are text in JSON."""
    fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    is_number = fits or isinstance(value, float) or value in ("nan", "inf", "-inf")
    return float(_checked(value, is_number, "is no number"))


def choice(*choices: str) -> Reader[Any]:
    """Read one of some texts."""
    return lambda value: _checked(value, value in choices, f"is none of {named(choices)}")


def optional(reader: Reader[_T]) -> Reader[_T | None]:
    """Read a value, or `None`."""
    return lambda value: None if value is None else reader(value)


def by_name(reader: Reader[_T]) -> Reader[dict[str, _T]]:
    """Read a mapping from names."""

    def read_all(value: Any) -> dict[str, _T]:
        items = _checked(value, isinstance(value, Mapping), "is no mapping").items()
        return {text(name): reader(item) for name, item in items}

    return read_all


def several(reader: Reader[_T]) -> Reader[tuple[_T, ...]]:
    """Read a list."""
    return lambda value: tuple(reader(item) for item in _checked(value, isinstance(value, (list, tuple)), "is no list"))


def row(*readers: Reader[Any]) -> Reader[tuple[Any, ...]]:
    """Read a list of so many values, each in its own way."""

    def read_row(value: Any) -> tuple[Any, ...]:
        fine = isinstance(value, (list, tuple)) and len(value) == len(readers)
        cells = _checked(value, fine, f"is no list of {len(readers)} values")
        return tuple(reader(cell) for reader, cell in zip(readers, cells, strict=True))

    return read_row


def _checked(value: Any, fine: bool, otherwise: str) -> Any:
    if not fine:
        raise ValueError(f"{_shown(value)} {otherwise}")
    return value


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
