"""The sentences that people read, in Markdown pages and in Python files, each with the line on which it begins.

From a page: headings, paragraphs, list items and table cells. From a Python file: docstrings, comments, and string
literals of four words and more, which are messages. Code, directives and examples are left out. Code in the middle of
a sentence, and values in the middle of a message, become one word.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_BREAK = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`A-Z\d])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|etc|resp|No|approx)\.[\"')]*$")
_DIRECTIVE = re.compile(r"^:::.*$|^:[a-z-]+:.*$|^\(\w+\)=$", re.MULTILINE)
_CODE = re.compile(r"``[^`]+``|`[^`]+`")
_LINK = re.compile(r"\[([^]]*)\](?:\([^)]*\)|\[[^]]*\])|:\w+:`[^`]*`|https?://\S+")
_SECTION = re.compile(r"^(?:Args|Attributes|Returns|Yields|Raises|Cost|Note|Warning|Example|Examples):$")
_LIST_ITEM = re.compile(r"^(?:[-*] |\d+\. )")
_ARGUMENT = re.compile(r"^\*{0,2}\w+(?: \([^)]*\))?: ")
_DIRECTIVE_COMMENT = re.compile(r"^(noqa|type:|pyright:|fmt:|pragma|-{2,})|-{4,}$")


class Sentence(NamedTuple):
    """One sentence, and where it stands."""

    path: Path
    line: int
    text: str
    is_heading: bool = False

    @property
    def num_words(self) -> int:
        """The number of words, in which code of any length is one."""
        return len(re.findall(r"[A-Za-z0-9][\w'./+*-]*", _CODE.sub("Code", self.text)))


def sentences_of(path: Path) -> list[Sentence]:
    """Return the sentences of a page or a Python file, in the order of their lines."""
    text = path.read_text(encoding="utf-8")
    passages = _of_page(text) if path.suffix == ".md" else _of_source(text)
    found = [
        Sentence(path, line + passage.count("\n", 0, start), sentence, is_heading)
        for line, passage, is_heading in passages
        for start, sentence in ([(0, passage)] if is_heading else _split(passage))
    ]
    return sorted(found, key=lambda sentence: sentence.line)


def _split(passage: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a paragraph with their positions in it."""
    start = 0
    for match in [*_BREAK.finditer(passage), None]:
        end = len(passage) if match is None else match.start()
        if match is not None and _ABBREVIATION.search(passage[start:end]):
            continue
        sentence = re.sub(r"\s+", " ", passage[start:end]).strip()
        if re.search(r"[A-Za-z]", sentence):
            yield start + len(passage[start:end]) - len(passage[start:end].lstrip()), sentence
        start = len(passage) if match is None else match.end()


# -- pages -------------------------------------------------------------------------------------------------------------


def _of_page(text: str) -> Iterator[tuple[int, str, bool]]:
    tokens = _MARKDOWN.parse(text)
    line = 0
    for before, token in itertools.pairwise(tokens):
        if before.map is not None:
            line = before.map[0]
        if token.type == "inline" and token.children is not None:
            words = "".join(
                f"`{child.content}`" if child.type == "code_inline"
                else "\n" if child.type in ("softbreak", "hardbreak")
                else "\0" if child.type == "strong_close"
                else child.content if child.type in ("text", "image") else ""
                for child in token.children
            )  # fmt: skip
            words = re.sub(r"^(\w+)\.\0", r"\1:", words).replace("\0", "")  # a label: **Speed.** It is ...
            yield line + 1, _DIRECTIVE.sub("", words), before.type == "heading_open"


# -- Python files ------------------------------------------------------------------------------------------------------


def _of_source(text: str) -> Iterator[tuple[int, str, bool]]:
    tree = ast.parse(text)
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.add(node.value)
            yield from _of_docstring(node.value.value, node.lineno)
        elif isinstance(node, ast.JoinedStr) and node not in inside:
            inside.update(ast.walk(node))
            values = (each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
            yield from _of_message("".join(map(str, values)), node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield from _of_message(node.value, node.lineno)
    yield from _of_comments(text)


def _of_message(text: str, line: int) -> Iterator[tuple[int, str, bool]]:
    """Yield each paragraph of a string literal that is a message: four words in a row, and no markup."""
    if re.search(r"(?:[A-Za-z,']+ ){3}[A-Za-z]+", text) and not re.search(r"[{};] *\n|</?\w+>|\(\?[:P]|\\[sdw]", text):
        yield from ((line, part.replace("\n", " "), False) for part in re.split(r"\n\s*", text))


def _of_comments(text: str) -> Iterator[tuple[int, str, bool]]:
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#: ")
        if block and (token.start[0] != first + len(block) or token.line.strip() != token.string):
            yield first, "\n".join(block), False
            block = []
        if not _DIRECTIVE_COMMENT.search(words):
            first = first if block else token.start[0]
            block.append(words)
    yield first, "\n".join(block), False


def _of_docstring(text: str, line: int) -> Iterator[tuple[int, str, bool]]:
    """Yield the paragraphs and items of a Google-style docstring, without directives and their contents."""
    line += text[: len(text) - len(text.lstrip())].count("\n")
    block: list[str] = []
    first, skipped_from, in_section = line, None, False
    for number, row in enumerate([*inspect.cleandoc(text).splitlines(), ""], line):
        words, indent = row.strip(), len(row) - len(row.lstrip())
        if words and skipped_from is not None:
            if indent > skipped_from:
                continue
            skipped_from = None
        starts_code = words.startswith((".. ", ">>>")) or re.search(r"\S {3,}\S", words) is not None
        in_section = _SECTION.match(words) is not None or (in_section and (not words or indent > 0))
        is_item = _LIST_ITEM.match(words) or (in_section and _ARGUMENT.match(words))
        if not words or starts_code or is_item or _SECTION.match(words):
            if block:
                yield first, _prose("\n".join(block)), False
            block = []
        if starts_code or words.endswith("::"):
            skipped_from = indent
        if words and not starts_code and not _SECTION.match(words):
            first = first if block else number
            block.append((is_item.re.sub("", words, count=1) if is_item else words).removesuffix("::"))


def _prose(text: str) -> str:
    return _LINK.sub(lambda match: match[1] or "`link`", text)
