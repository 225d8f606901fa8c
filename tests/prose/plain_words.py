"""Sentences that people read are plain: pages, docstrings, comments and messages, by rules that can be counted.

The rules find only a part of what makes a sentence hard. Read a page aloud before you rely on them. From a page they
check headings, paragraphs, list items and table cells. From a Python file they check docstrings, comments, and string
literals of four words and more, which are messages. Code, directives and examples are left out. Code in the middle of a
sentence, and values in the middle of a message, become one word.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import itertools
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
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


# -- the rules ---------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_amp"
MOST_WORDS = 30
MOST_WORDS_OF_A_HEADING = 12
PARTICIPLE = "Read|Written|Kept|Given|Shown|Measured|Counted|Compared|Logged|Printed|Saved|Checked|Needed|Tried|Tested"

# proselint's rules for essays, which are wrong for technical text. All others are on.
NOT_FOR_TECHNICAL_TEXT = {
    "archaism": "it takes `for every` as `for ever`",
    "dates_times": "it takes `am` and ranges of numbers as times",
    "typography": "`...`, `x` and straight quotes are what a terminal and a source file show",
}


def folders() -> dict[str, list[Path]]:
    """The files that are checked together: each page at the top, each folder of pages, and each room of the package."""
    found: dict[str, list[Path]] = {path.name: [path] for path in sorted(ROOT.glob("*.md"))}
    for path in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py"), *PACKAGE.rglob("*.py")]:
        if "_build" not in path.parts:
            found.setdefault("/".join(path.relative_to(ROOT).parts[:-1][:2]), []).append(path)
    return {name: sorted(paths) for name, paths in sorted(found.items())}


FOLDERS = folders()


# -- what style asks for -----------------------------------------------------------------------------------------------


def is_too_long(sentence: Sentence) -> bool:
    return sentence.num_words > MOST_WORDS


def begins_with_a_relative_clause(sentence: Sentence) -> bool:
    """As in "What is put back is a table": the actor or the thing is missing. A question is none."""
    begins = re.match(r"\W*(?:What|Who|Whoever|Whom|Whose|As of)\b", sentence.text)
    return begins is not None and not re.search(r"\?[\"'`)]*$", sentence.text)


def has_a_pronoun_without_a_noun(sentence: Sentence) -> bool:
    """As in "those of a run": "those of" needs a plural before it, "that of" a noun with its article."""
    before_those = re.match(r"(.*?)\bthose (?:of|that|which|who|with|without|from|in)\b", sentence.text, re.IGNORECASE)
    before_that = re.match(r"(.*?(?<!so ))\bthat of\b", sentence.text, re.IGNORECASE)
    plural = r"\b(?!is\b|was\b|has\b|as\b|its?\b|this\b|does\b|less\b)\w+s\b|`|\b(?:two|three|both|many|all) "
    named = r"(?i)\b(?:the|whose|a|an|its|their|your|each|no|one|every|this|same) [`\w]|\w+'s \w|`"
    return (before_those is not None and not re.search(plural, before_those[1])) or (
        before_that is not None and not re.search(named, before_that[1])
    )


def has_its_verb_first(sentence: Sentence) -> bool:
    """As in "Written is the file": the word order of another language."""
    return re.match(rf"\W*(?:{PARTICIPLE}) (?:is|are|was|were)\b", sentence.text) is not None


def is_one_word(sentence: Sentence) -> bool:
    """As in "Likewise.", for which the reader must look elsewhere."""
    is_short = sentence.num_words == 1 and sentence.text.endswith(".") and not sentence.is_heading
    is_name = re.match(r"`|\.\.\.|X|[A-Z][a-z]+[A-Z]", sentence.text) is not None
    return is_short and not is_name


def is_no_search_term(sentence: Sentence) -> bool:
    """A heading that is too long, or is about a thing that only the text below names. An error message is as it is."""
    if not sentence.is_heading or re.search(r'"[^"]+"', sentence.text):
        return False
    pronoun = r"(?i)\b(?:it|they|them|those|these|here|there|somebody|nobody|everybody)\b"
    too_long = sentence.num_words > MOST_WORDS_OF_A_HEADING
    return too_long or re.search(pronoun, sentence.text) is not None or sentence.text.endswith((".", ":", ","))


RULES: dict[str, Callable[[Sentence], bool]] = {
    f"over {MOST_WORDS} words": is_too_long,
    "begins with What or Who and asks nothing": begins_with_a_relative_clause,
    "those of, that of: without its noun": has_a_pronoun_without_a_noun,
    "the verb before its subject": has_its_verb_first,
    "a sentence of one word": is_one_word,
    "a heading that nobody would search for": is_no_search_term,
}


def faults(sentences: list[Sentence]) -> Iterator[str]:
    """Each sentence that breaks a rule, with file, line and rule."""
    for sentence in sentences:
        for name, breaks in RULES.items():
            if breaks(sentence):
                yield f"{_place(sentence)}: [{name}] {sentence.text}"


def faults_of_proselint(sentences: list[Sentence]) -> Iterator[str]:
    """Each sentence to which proselint objects, with file, line and its advice."""
    tools = pytest.importorskip("proselint.tools")
    text = "\n\n".join(_as_essay(sentence.text) for sentence in sentences)
    for found in tools.LintFile("", text or " ").lint({"max_errors": 1000, "checks": _checks()}):
        result = found.check_result
        before, words = f"\n{text}"[: result.span[0]], f"\n{text}"[slice(*result.span)]
        if "\n\n" in words.strip():  # half of it is another sentence's
            continue
        number = (before.count("\n") - 1 + words[: len(words) - len(words.lstrip())].count("\n")) // 2
        yield f"{_place(sentences[number])}: [{result.check_path}: {result.message}] {sentences[number].text}"


def _as_essay(text: str) -> str:
    """Return a sentence for proselint: code and numbers are words, and quotes go, since it checks nothing in them."""
    numbers = itertools.count(1)
    text = re.sub(r"``[^`]+``|`[^`]+`|\d+|\bX+\b", lambda _: f"Q{next(numbers)}", text)
    return re.sub(r"\B[\"']|[\"']\B", "", text)


def _checks() -> dict[str, bool]:
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry

    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    return {**DEFAULT["checks"], **dict.fromkeys(NOT_FOR_TECHNICAL_TEXT, False)}


@functools.cache
def sentences_in(folder: str) -> list[Sentence]:
    return [sentence for path in FOLDERS[folder] for sentence in sentences_of(path)]


def _place(sentence: Sentence) -> str:
    inside = sentence.path.is_relative_to(ROOT)
    return f"{sentence.path.relative_to(ROOT) if inside else sentence.path.name}:{sentence.line}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_plain(folder: str) -> None:
    found = list(faults(sentences_in(folder)))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_proselint_objects_to_nothing(folder: str) -> None:
    found = list(faults_of_proselint(sentences_in(folder)))
    assert not found, "\n" + "\n".join(found)


# -- the rules themselves ----------------------------------------------------------------------------------------------

PLANTED = {
    "long": ("It " + "is and " * 15 + "was.", "over 30 words"),
    "what": ("What is put back is a table.", "begins with What or Who and asks nothing"),
    "who": ("Whoever asked for it gets an error.", "begins with What or Who and asks nothing"),
    "as of": ("As of the last step.", "begins with What or Who and asks nothing"),
    "those of": ("Those of a run that never drew the batch.", "those of, that of: without its noun"),
    "that of": ("It is that of validation.", "those of, that of: without its noun"),
    "inverted": ("Written are the entries of a checkpoint.", "the verb before its subject"),
    "one word": ("Likewise.", "a sentence of one word"),
    "proselint": ("The the loss scale is halved.", "lexical_illusions"),
}
PLAIN = [
    "What is a loss scale?",
    "Its gradients are those of fp32.",
    "The loss of the run is that of the first batch.",
    "The file is written after each step.",
    "It works, e.g. in fp16.",
]
PLACES = {
    "a paragraph": ("page.md", "# Title\n\nThe first line.\n\n{}\n", 5),
    "a list": ("page.md", "# Title\n\n- one thing\n- {}\n", 4),
    "a table": ("page.md", "# Title\n\n| a | b |\n|---|---|\n| c | {} |\n", 5),
    "a file's docstring": ("file.py", '"""{}"""\n', 1),
    "a second paragraph": ("file.py", 'def f():\n    """Return it.\n\n    {}\n    """\n', 4),
    "an argument": ("file.py", 'def f(x):\n    """Return it.\n\n    Args:\n        x: {}\n    """\n', 5),
    "a comment": ("file.py", "x = 1\n# {}\n", 2),
    "a trailing comment": ("file.py", "x = 1\ny = 2  # {}\n", 2),
    "a message": ("file.py", 'x = 1\nraise ValueError(f"The value {{x}} is not allowed here. {}")\n', 2),
}


def found_in(text: str, name: str, folder: Path) -> list[str]:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    sentences = sentences_of(path)
    return [*faults(sentences), *faults_of_proselint(sentences)]


@pytest.mark.parametrize(
    ("planted", "place"),
    [
        *((planted, "a paragraph") for planted in PLANTED),
        *(("what", place) for place in PLACES if place != "a paragraph"),
    ],
)
def test_a_planted_sentence_is_found(planted: str, place: str, tmp_path: Path) -> None:
    (sentence, rule), (name, template, line) = PLANTED[planted], PLACES[place]
    found = found_in(template.format(sentence), name, tmp_path)
    assert [text for text in found if text.startswith(f"{name}:{line}: [{rule}") and text.endswith(sentence)], found


@pytest.mark.parametrize("sentence", PLAIN)
def test_a_plain_sentence_is_not(sentence: str, tmp_path: Path) -> None:
    for place in ("a paragraph", "a comment"):
        name, template, _ = PLACES[place]
        assert found_in(template.format(sentence), name, tmp_path) == []


@pytest.mark.parametrize(
    "heading",
    ["Where it helps", "All the settings which any user of the package could ever want to change", "Run."],
)
def test_a_heading_that_nobody_would_type(heading: str, tmp_path: Path) -> None:
    assert len(found_in(f"# {heading}\n", "page.md", tmp_path)) == 1
    assert found_in(f"{heading}\n", "page.md", tmp_path) in ([], [f"page.md:1: [a sentence of one word] {heading}"])


def test_code_is_not_read(tmp_path: Path) -> None:
    code = "```python\n# What is this.\n```\n\n```{toctree}\nWhat is this.\n```\n"
    assert found_in(code, "page.md", tmp_path) == []
    code = '"""Return.\n\n.. code-block:: python\n\n    # What is this.\n"""\nx = {"What": r"Who\\s+is that of x"}\n'
    assert found_in(code, "file.py", tmp_path) == ["file.py:1: [a sentence of one word] Return."]


def test_there_is_something_to_read() -> None:
    assert {"README.md", "docs/guide", "lightning_amp/precision", "examples"} <= set(FOLDERS)
    assert len(sentences_in("lightning_amp/precision")) > 300
