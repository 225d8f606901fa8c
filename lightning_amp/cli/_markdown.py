"""Markdown on a terminal: as rich lays it out, but for tables, of which rich cuts off what is too wide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_amp.cli._output import paragraph, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_CELL_END = re.compile(r"(?<!\\)\|")


def markdown(text: str) -> Iterator[RenderableType]:
    """Yield what to show of a Markdown text."""
    from rich.markdown import Markdown

    for number, block in enumerate(re.split(r"\n{2,}", text.strip())):
        if number:
            yield ""
        if not block.startswith("|"):
            yield paragraph(Markdown(block))
            continue
        header, _, *rows = ([cell.replace("\\|", "|").strip() for cell in _cells(line)] for line in block.splitlines())
        yield table(header, rows, justify="left")


def _cells(line: str) -> list[str]:
    return _CELL_END.split(line.strip())[1:-1]
