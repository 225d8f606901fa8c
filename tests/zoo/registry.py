"""A registry of cases for parametrized tests. Each is declared once, beside its code, with tags to select it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pytest

MARKS = frozenset({"cpu", "slow"})
"""Tags that are also marks of pytest."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A case; subclasses add its expected results.

    Attributes:
        name: Unique among the entries of its kind.
        tags: Words to select it by, such as `healthy`.

    """

    name: str
    tags: frozenset[str] = frozenset()


E = TypeVar("E", bound=Entry)
_entries: dict[type[Entry], dict[str, Entry]] = {}


def add(entry: E) -> E:
    """Put an entry into the registry, and return it."""
    named = _entries.setdefault(type(entry), {})
    if entry.name in named:
        raise ValueError(f"there are two entries {entry.name!r} of {type(entry).__name__}: names must be unique")
    named[entry.name] = entry
    return entry


def entries(kind: type[E], *tags: str) -> dict[str, E]:
    """Return the entries of a kind that have all of these tags, in the order of their declaration, by name."""
    named = cast("dict[str, E]", _entries.get(kind, {}))
    return {name: entry for name, entry in named.items() if entry.tags.issuperset(tags)}


def cases(kind: type[Entry], *tags: str) -> list[Any]:
    """Return the same entries for `pytest.mark.parametrize`."""
    found = entries(kind, *tags).values()
    marks = {entry.name: [getattr(pytest.mark, tag) for tag in sorted(entry.tags & MARKS)] for entry in found}
    return [pytest.param(entry, id=entry.name, marks=marks[entry.name]) for entry in found]
