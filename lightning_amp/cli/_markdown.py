"""Markdown on a terminal: as rich lays it out, but for tables, of which rich cuts off what is too wide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_amp.cli._output import GAP, output_width, paragraph, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_CELL_END = re.compile(r"(?<!\\)\|")


def markdown(text: str) -> Iterator[RenderableType]:
    """Yield what to show of a Markdown text.

    A table that is too wide is turned, so that its rows are columns, if it fits then; else its cells are wrapped.

    """
    from rich.markdown import Markdown

    for number, block in enumerate(re.split(r"\n{2,}", text.strip())):
        if number:
            yield ""
        if not block.startswith("|"):
            yield paragraph(Markdown(block))
            continue
        header, _, *rows = ([cell.replace("\\|", "|").strip() for cell in _cells(line)] for line in block.splitlines())
        lines = [header, *rows]
        turned = [list(column) for column in zip(*lines, strict=True)]
        if _width(lines) > output_width() >= _width(turned):
            lines = turned
        yield table(lines[0], lines[1:], justify="left")


def _cells(line: str) -> list[str]:
    return _CELL_END.split(line.strip())[1:-1]


def _width(lines: list[list[str]]) -> int:
    """Return how wide a table is whose cells are not wrapped."""
    return sum(max(map(len, column)) + GAP for column in zip(*lines, strict=True)) - GAP
