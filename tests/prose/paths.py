"""Files and names of this project that its documents and docstrings mention exist."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *(ROOT / name for name in ("Makefile", "pyproject.toml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for folder in ("lightning_amp", "examples") for path in (ROOT / folder).rglob("*.py")),
]
FOLDERS = r"(?:lightning_amp|tests|benchmarks|docs(?!/_build)|examples)"
FILE = re.compile(rf"(?<![\w./-]){FOLDERS}/(?!\d)(?:[\w.*-]+/)*[\w.*-]*\w")
IN_A_ROOM = re.compile(r"`((?:\w+/)?_\w+\.py)`")
NAME = re.compile(r"(?<![\w./])lightning_amp(?:\.[A-Za-z_]\w*)+\b(?!\{)")


def missing(text: str) -> Iterator[str]:
    for file in FILE.findall(text):
        if not any(ROOT.glob(file)):
            yield file
    for file in IN_A_ROOM.findall(text):
        if not any((ROOT / "lightning_amp").rglob(file)):
            yield file
    for name in NAME.findall(text):
        if not resolves(name):
            yield name


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of a module or of a class in one."""
    if name == "lightning_amp.pytorch_lightning":  # a process has one kind of Lightning
        return True
    found, *attributes = name.split(".")
    value: object = importlib.import_module(found)
    for attribute in attributes:
        found += f".{attribute}"
        if not hasattr(value, attribute):
            try:
                importlib.import_module(found)
            except ImportError:
                return False
        value = getattr(value, attribute)
    return True


def test_what_is_mentioned_exists() -> None:
    found = {str(path.relative_to(ROOT)): sorted(set(missing(path.read_text(encoding="utf-8")))) for path in TEXTS}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        "See `tests/integration/`, which is gone.",
        "`tests/unit/*/test_cellar.py`",
        "in `lightning_amp/_compat.py`",
        "written in `precision/_cellar.py`",
        "written in `_cellar.py`",
        ":class:`~lightning_amp.numerics.Diagnosis`",
        "lightning_amp.AmpPrecision.no_such_method",
    ],
)
def test_what_is_missing_is_found(text: str) -> None:
    assert list(missing(text))
