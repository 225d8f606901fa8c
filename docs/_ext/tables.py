"""Pages that fit the screen: long names break at dots, and on a phone table cells show the name of their column.

The written page is changed, and not the document: the search still finds whole names.
"""

from __future__ import annotations

import re
from html import escape, unescape
from itertools import count
from typing import Any

from sphinx.application import Sphinx

TABLE = re.compile(r'<table class="docutils.*?</table>', re.DOTALL)
HEAD = re.compile(r"<th class=\"head[^>]*>(.*?)</th>", re.DOTALL)
NAME = re.compile(r'<span class="pre">([^<]+)</span>')
NUMBER = re.compile(r"(?<=[\s>(])[+-]?[\d.,]+(?:e[+-]\d+)?(?=[\s<,)])")
LONGEST_UNBROKEN = 24
"""Characters of a name that stays on one line. A longer one may break after a dot, an underscore, a slash or `=`."""
OUTPUT = re.compile(
    r'(?<=<div class="highlight-text notranslate"><div class="highlight"><pre>).*?(?=</pre>)', re.DOTALL
)
COLUMNS = re.compile(r"\S {2,}\S")
FEWEST_COLUMNS = 3
"""A table of two columns is readable on a phone as it is."""


def fit(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Change the tables of a page that is about to be written."""
    if "body" in context:
        body = NAME.sub(_breaking, context["body"])
        body = OUTPUT.sub(lambda match: "\n".join(map(_unwrapped_columns, match[0].split("\n"))), body)
        context["body"] = TABLE.sub(lambda match: _fitting(match[0]), body)


def _breaking(name: re.Match[str]) -> str:
    if len(unescape(name[1])) <= LONGEST_UNBROKEN:
        return f'<span class="pre unbroken">{name[1]}</span>'
    parts = re.sub(r"(?<=\w[_./=])(?=\w)", "<wbr>", name[1])
    return f'<span class="pre">{parts}</span>'


def _unwrapped_columns(line: str) -> str:
    return f'<span class="columns">{line}</span>' if COLUMNS.search(line) and "<" not in line else line


def _fitting(table: str) -> str:
    table = NUMBER.sub(
        lambda match: f'<span class="unbroken">{match[0]}</span>' if "-" in match[0] else match[0], table
    )
    columns = [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in HEAD.findall(table)]
    if len(columns) < FEWEST_COLUMNS:
        return table

    def with_columns(row: re.Match[str]) -> str:
        number = count()
        return re.sub("<td", lambda _: f'<td data-column="{escape(columns[next(number) % len(columns)])}"', row[0])

    table = re.sub(r"<tr.*?</tr>", with_columns, table, flags=re.DOTALL)
    table = re.sub(r'<td (data-column="[^"]*")[^>]*>(?=(?:<p>)?\s*(?:</p>)?\s*</td>)', r'<td class="empty" \1>', table)
    return table.replace('<table class="docutils', '<table class="stacked docutils', 1)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the change."""
    app.connect("html-page-context", fit)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
