"""Pages that fit the screen: long names break between their parts, and on a phone table cells show their column's name.

The written page is changed, and not the document: the search still finds whole names.
"""

from __future__ import annotations

import re
from html import escape, unescape
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the tests run without Sphinx, too
    from sphinx.application import Sphinx

TABLE = re.compile(r'<table class="docutils.*?</table>', re.DOTALL)
HEAD = re.compile(r"<th class=\"head[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
NAME = re.compile(r'<span class="pre">([^<]+)</span>')
NUMBER = re.compile(r"(?<=[\s>(])[+-]?[\d.,]+(?:e[+-]\d+)?(?=[\s<,)])")
LONGEST_UNBROKEN = 24
"""Characters of a name that stays on one line.

A longer name may break after a dot, a slash, a bracket or `=`. A part that is still longer may break after underscores.
"""
BETWEEN_PARTS = re.compile(r"(?<=\w\w[./=(])(?=[\w\[])")
OUTPUT = re.compile(
    r'(<div class="highlight-(?:text|bash) notranslate"><div class="highlight"><pre>(?:<span></span>)?)(.*?)(?=</pre>)',
    re.DOTALL,
)
COLUMNS = re.compile(r"\S {2,}\S|^\|.*\|$")
OPTION = re.compile(r"(?<![\w-])--\w[\w-]*")
SHORT = 24
"""Characters of a value that stands beside the name of its column on a phone, and not below it."""
LONGEST_BESIDE = 16
"""Characters of the name of a column that has its values beside it."""
MANY_COLUMNS = 8
"""From this number of columns on, a table is written in smaller letters, so that it fits beside the navigation."""
FEWEST_COLUMNS = 3
LONGEST_FIRST = 80
"""A table of two columns is readable on a phone as it is, unless a cell of its first column has more characters."""
LONGEST_BOTH = 36
"""Nor is it if the longest unbroken names of its two columns have more characters together."""
PARTS = re.compile(r'<span class="pre(?: unbroken)?">(.*?)</span>')


def fit(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Change the tables of a page that is about to be written."""
    if "body" in context:
        body = NAME.sub(_breaking, context["body"])
        body = OUTPUT.sub(lambda match: match[1] + "\n".join(map(_unwrapped, match[2].split("\n"))), body)
        context["body"] = TABLE.sub(lambda match: _fitting(match[0]), body)
    if "toc" in context:
        context["toc"] = NAME.sub(_breaking, context["toc"])


def _breaking(name: re.Match[str]) -> str:
    if len(unescape(name[1])) <= LONGEST_UNBROKEN:
        return f'<span class="pre unbroken">{name[1]}</span>'
    parts = [
        part if len(unescape(part)) <= LONGEST_UNBROKEN else re.sub(r"(?<=\w_)(?=\w)", "<wbr>", part)
        for part in BETWEEN_PARTS.split(name[1])
    ]
    return f'<span class="pre">{"<wbr>".join(parts)}</span>'


def _unwrapped(line: str) -> str:
    """Keep columns beside each other, and the dashes of an option with its name."""
    if COLUMNS.search(line) and "<" not in line:
        return f'<span class="columns">{line}</span>'
    return OPTION.sub(r'<span class="unbroken">\g<0></span>', line)


def _fitting(table: str) -> str:
    table = NUMBER.sub(
        lambda match: f'<span class="unbroken">{match[0]}</span>' if "-" in match[0] else match[0], table
    )
    columns = [_text(cell) for cell in HEAD.findall(table)]
    if len(columns) >= MANY_COLUMNS:
        table = table.replace('<table class="docutils', '<table class="many docutils', 1)
    cells = [CELL.findall(row) for row in ROW.findall(table)]
    rows = [[_text(cell) for cell in row] for row in cells]
    if len(columns) < FEWEST_COLUMNS and not _is_wide(cells):
        return table
    beside = [
        len(name) <= LONGEST_BESIDE and all(len(value) <= SHORT for row in rows for value in row[i : i + 1])
        for i, name in enumerate(columns)
    ]

    def with_columns(row: re.Match[str]) -> str:
        number = count()

        def named(_: re.Match[str]) -> str:
            i = next(number) % len(columns)
            return f'<td data-column="{escape(columns[i])}"{" data-beside" * beside[i]}'

        return re.sub("<td", named, row[0])

    table = ROW.sub(with_columns, table)
    table = re.sub(r'<td (data-column="[^"]*")[^>]*>(?=(?:<p>)?\s*(?:</p>)?\s*</td>)', r'<td class="empty" \1>', table)
    return re.sub('<table class="(?=(?:many )?docutils)', '<table class="stacked ', table, count=1)


def _is_wide(cells: list[list[str]]) -> bool:
    """Return whether the two columns do not fit beside each other on a phone."""
    first = max((len(_text(row[0])) for row in cells if row), default=0)
    names = [
        max(
            (len(unescape(part)) for cell in column for name in PARTS.findall(cell) for part in name.split("<wbr>")),
            default=0,
        )
        for column in zip(*filter(None, cells), strict=True)
    ]
    return first > LONGEST_FIRST or sum(names) > LONGEST_BOTH


def _text(cell: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", cell)).strip()


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the change."""
    app.connect("html-page-context", fit)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
