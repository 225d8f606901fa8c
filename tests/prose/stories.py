"""The stories of `docs/design.md` lead through files that are there, each connected with one before it by an import."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source import PACKAGE, Package

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
_STORY = re.compile(r"^### (.+)\n((?:.*\n)*?)(?=^#|\Z)", re.MULTILINE)
_STEP = re.compile(r"^\d+\. `([\w/]+\.py)`", re.MULTILINE)


def stories() -> dict[str, list[str]]:
    """The files of each story, by its title."""
    text = DESIGN.read_text(encoding="utf-8")
    return {story[1]: _STEP.findall(story[2]) for story in _STORY.finditer(text) if _STEP.search(story[2])}


def broken_links(package: Package, files: list[str]) -> Iterator[str]:
    """Files that are not there, and files that neither import one before them nor are imported by one."""
    seen: list[str] = []
    for file in files:
        if file not in package.files:
            yield f"{file} is not there"
        elif seen and not any(other in _imported(package, file) or file in _imported(package, other) for other in seen):
            yield f"{file} is connected with none of {', '.join(seen)}"
        else:
            seen.append(file)


def _imported(package: Package, file: str) -> set[str]:
    """The files of ours whose names a file imports, through the rooms that hand them on."""
    found: set[str] = set()
    for each in package.files[file].imports:
        name = package.definition(f"{each.module}.{each.name}") if each.name else each.module
        while name and name not in package.modules:
            name = name.rpartition(".")[0]
        if name:
            found.add(package.modules[name].path)
    return found


def test_there_are_five_stories() -> None:
    assert list(stories()) == [
        "From an optimizer step to its record",
        "From a skipped step to its report",
        "From a validation batch to a metric difference",
        "From a trained arm to a verdict",
        "From a slow project to a finding of the doctor",
    ]


@pytest.mark.parametrize("title", list(stories()))
def test_a_story_can_be_followed(title: str) -> None:
    assert list(broken_links(PACKAGE, stories()[title])) == []


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        (["scaling/_a.py", "scaling/_gone.py"], "scaling/_gone.py is not there"),
        (["scaling/_a.py", "scaling/_far.py"], "scaling/_far.py is connected with none of scaling/_a.py"),
    ],
)
def test_a_story_that_leads_nowhere_is_found(files: list[str], finding: str) -> None:
    package = PACKAGE.with_file("scaling/_a.py", "from lightning_amp.scaling._b import b")
    package = package.with_file("scaling/_b.py", "b = 1").with_file("scaling/_far.py", "")
    assert list(broken_links(package, files)) == [finding]
    assert not list(broken_links(package, ["scaling/_b.py", "scaling/_a.py"]))
