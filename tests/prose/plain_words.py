"""Sentences that people read are plain: pages, docstrings, comments and messages, by rules that can be counted.

The rules find only a part of what makes a sentence hard. Read a page aloud before you rely on them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.prose import Sentence, sentences_of

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
