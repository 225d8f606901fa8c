"""The guides name every argument of the public classes, and every key that is logged."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import lightning_amp

ROOT = Path(__file__).parents[2]
GUIDES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "guide").glob("*.md")))
ARGUMENTS = [
    (name, argument)
    for name in lightning_amp.__all__
    if inspect.isclass(item := getattr(lightning_amp, name))
    for argument in inspect.signature(item).parameters
]
KEYS = sorted(
    {
        key.removesuffix("/")
        for path in (ROOT / "lightning_amp" / "callbacks").glob("*.py")
        for key in re.findall(r'"(amp/[a-z0-9_/]+)"', path.read_text(encoding="utf-8"))
    }
)


def is_named(word: str, text: str) -> bool:
    """In code marks, alone or with what follows: `word`, `word=...`, `word/<metric>`."""
    return re.search(rf"`{re.escape(word)}(?![\w/]*\w/)[^\w`][^`]*`|`{re.escape(word)}`", text) is not None


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=lambda value: value)
def test_every_argument(name: str, argument: str) -> None:
    assert is_named(argument, GUIDES), f"no guide names `{argument}` of `{name}`"


@pytest.mark.parametrize("key", KEYS)
def test_every_key(key: str) -> None:
    assert is_named(key, GUIDES), f"no guide names `{key}`"


def test_there_is_something_to_look_for() -> None:
    assert {"amp/loss_scale", "amp/diff", "amp/overflows"} <= set(KEYS)
    assert ("AmpPrecision", "fp32_modules") in ARGUMENTS
    assert not is_named("warn_bel", "`warn_below=0.1`")
    assert is_named("warn_below", "`warn_below=0.1`")
    assert is_named("amp/diff", "`amp/diff/<metric>`")
