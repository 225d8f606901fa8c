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
FEWEST_COLUMNS = 3
"""A table of two columns is readable on a phone as it is."""


def fit(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Change the tables of a page that is about to be written."""
    if "body" in context:
        body = NAME.sub(lambda match: re.sub(r"(?<=\w[_./=])(?=\w)", "<wbr>", match[0]), context["body"])
        context["body"] = TABLE.sub(lambda match: _fitting(match[0]), body)


def _fitting(table: str) -> str:
    columns = [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in HEAD.findall(table)]
    if len(columns) < FEWEST_COLUMNS:
        return table

    def with_columns(row: re.Match[str]) -> str:
        number = count()
        return re.sub("<td", lambda _: f'<td data-column="{escape(columns[next(number) % len(columns)])}"', row[0])

    table = re.sub(r"<tr.*?</tr>", with_columns, table, flags=re.DOTALL)
    return table.replace('<table class="docutils', '<table class="stacked docutils', 1)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the change."""
    app.connect("html-page-context", fit)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
