"""Turn values into plain data for JSON, and texts and tables into Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import final, override

_PIPE = re.compile(r"(\\*)(\|)")  # a pipe after an even number of backslashes ends the cell
_TAG = re.compile(r"(\\*)(<(?=[A-Za-z/!?]))")


def plain(value: Any, not_finite: Callable[[float], Any] = str) -> Any:
    """Return plain data for JSON, which cannot hold infinities and NaN.

    Args:
        value: Numbers, texts, and mappings and sequences of them.
        not_finite: Returns the replacement of such a number: by default a text; with `float` the number itself.

    """
    if isinstance(value, float) and not math.isfinite(value):
        return not_finite(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, not_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, not_finite) for item in value]
    return value


def null(value: float) -> None:
    """Replace a number that is not finite by `null`."""


def line(text: str) -> str:
    """Write a text on one line of Markdown, with escapes so that nothing is read as HTML."""
    return _TAG.sub(r"\1\1\\\2", " ".join(text.split()))


def code(text: str) -> str:
    """Write a name from the user as code, on one line."""
    on_one_line = " ".join(text.split()).replace("`", "'")
    return f"`{on_one_line}`"


@final
class Table(NamedTuple):
    """A table, whose `str` is Markdown. Pipes in cells are escaped.

    The cells of the `rule` stand below the header: by default `---`, which leaves the alignment open.
    """

    header: Sequence[str]
    rows: Iterable[Sequence[str]]
    rule: Sequence[str] = ()

    @override
    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        cells = [[_PIPE.sub(r"\1\1\\\2", line(cell)) for cell in cells] for cells in lines]
        cells.insert(1, [*(self.rule or ["---"] * len(self.header))])
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)
