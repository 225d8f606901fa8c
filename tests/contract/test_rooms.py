"""The rules about files that `make lint` cannot check: private files, ends of workarounds, lengths, stories."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "lightning_amp"
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
OPEN = {"_compat", ""}
"""Rooms whose files every room may import: `_compat`, and the helpers at the top."""


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield room and file of each import of ours: `from lightning_amp.scaling._steps import x` and others."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        for name in [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else names:
            top, *parts = name.split(".")
            if top == "lightning_amp" and len(parts) > 1 and (ROOT / parts[0]).is_dir():
                yield parts[0], parts[1]


def test_no_room_imports_a_private_name_of_another() -> None:
    found = {
        f"{path}: {room}.{name}"
        for path, tree in TREES.items()
        for room, name in imported(tree)
        if name.startswith("_") and room not in {*OPEN, path.split("/")[0]}
    }
    assert found == set()


def test_each_entry_of_compat_says_when_to_remove_it() -> None:
    for path, tree in TREES.items():
        text = (ROOT / path).read_text(encoding="utf-8").splitlines()
        for node in tree.body if path.startswith("_compat/") else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                above = text[max(0, node.lineno - 6) : node.lineno]
                described = f"{' '.join(above)} {ast.get_docstring(node) or ''}"
                assert re.search(r"(?i)\bremove\s+(when|with)", described), f"{path}: {node.name}"


def test_no_file_is_longer_than_450_lines() -> None:
    assert [path for path in TREES if (ROOT / path).read_text(encoding="utf-8").count("\n") > 450] == []


def test_the_contributing_guide_has_every_room() -> None:
    guide = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {path.split("/")[0] for path in TREES if "/" in path}
    assert [room for room in rooms if f"`{room}/`" not in guide] == []


def test_the_five_stories_of_the_design_lead_through_files_that_are_there() -> None:
    text = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    stories = [re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.MULTILINE) for part in re.split(r"^#+ ", text, flags=re.M)]
    assert len([story for story in stories if story]) == 5
    assert {file for story in stories for file in story} <= set(TREES)
