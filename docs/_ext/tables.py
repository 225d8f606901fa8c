"""Pages that fit the screen: names break at dots and underscores, and on a phone table cells show their column's name.

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
NAME = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
OUTPUT = re.compile(
    r'(?<=<div class="highlight-text notranslate"><div class="highlight"><pre>).*?(?=</pre>)', re.DOTALL
)
COLUMNS = re.compile(r"\S {2,}\S")
FEWEST_COLUMNS = 3
"""A table of two columns is readable on a phone as it is."""


def fit(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Change the tables of a page that is about to be written."""
    if "body" in context:
        body = NAME.sub(lambda match: re.sub(r"(?<=\w[_./=])(?=\w)", "<wbr>", match[0]), context["body"])
        body = OUTPUT.sub(lambda match: "\n".join(map(_unwrapped_columns, match[0].split("\n"))), body)
        context["body"] = TABLE.sub(lambda match: _fitting(match[0]), body)


def _unwrapped_columns(line: str) -> str:
    return f'<span class="columns">{line}</span>' if COLUMNS.search(line) and "<" not in line else line


def _fitting(table: str) -> str:
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
