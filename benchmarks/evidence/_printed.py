"""Turn the output of a part into Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks._machine import ROOT
from lightning_amp._text import counted

_MOST_LINES = 1000
_LAST_LINES = 15


def as_it_is(folder: Path) -> str:
    """Return the output of a part that printed Markdown."""
    return _text(folder / "printed.txt")


def in_a_block(folder: Path) -> str:
    """Return the output of a part that printed lines for a terminal."""
    return block(_text(folder / "printed.txt"))


def last_lines(folder: Path) -> str:
    """Return the end of the output of a part without a result."""
    printed, errors = (_text(folder / name).splitlines()[-_LAST_LINES:] for name in ("printed.txt", "errors.txt"))
    return block("\n".join([*printed, *errors])) if printed or errors else ""


def crashed(folder: Path) -> bool:
    """Return whether a part ended with an exception; its exit status can be the one for a fault that was found."""
    return "Traceback (most recent call last)" in (folder / "errors.txt").read_text(encoding="utf-8", errors="replace")


def results_of_tests(folder: Path) -> str:
    """Return how many tests passed, why others were skipped, and the last lines of failed tests."""
    cases = list(ElementTree.parse(folder / "results.xml").getroot().iter("testcase"))
    failed = [(case, found) for case in cases for found in case if found.tag in ("failure", "error")]
    skipped = [found.get("message", "") for case in cases for found in case if found.tag == "skipped"]
    num_passed = len(cases) - len({id(case) for case, _ in failed}) - len(skipped)
    return "\n".join(_results(num_passed, failed, Counter(skipped)))


def block(text: str) -> str:
    """Return a text as a preformatted block."""
    return f"````text\n{text}\n````"


def _results(
    num_passed: int, failed: list[tuple[ElementTree.Element, ElementTree.Element]], skipped: Counter[str]
) -> Iterator[str]:
    yield f"{counted(num_passed, 'test')} passed, {len(failed)} failed, {skipped.total()} skipped."
    if skipped:
        yield ""
        yield from (f"- {number} skipped: {' '.join(reason.split())}" for reason, number in skipped.items())
    for case, found in failed:
        yield ""
        yield f"Failed: `{case.get('name')}`"
        yield ""
        yield block("\n".join((found.text or found.get("message", "")).strip().splitlines()[-_LAST_LINES:]))


def _text(path: Path) -> str:
    """Return the end of a file for the page, without the folder of this checkout."""
    lines = path.read_text(encoding="utf-8", errors="replace").replace(f"{ROOT}/", "").strip().splitlines()
    cut = [f"({len(lines) - _MOST_LINES} lines before these are left out)"] if len(lines) > _MOST_LINES else []
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in [*cut, *lines[-_MOST_LINES:]])
