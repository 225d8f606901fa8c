"""The docstrings, which the reference shows, name every argument of the public classes and every key that is logged."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import lightning_amp

CALLBACKS = Path(__file__).parents[2] / "lightning_amp" / "callbacks"
CLASSES = {name: item for name in lightning_amp.__all__ if inspect.isclass(item := getattr(lightning_amp, name))}
DOCSTRINGS = {name: inspect.getdoc(item) or "" for name, item in CLASSES.items()}
ARGUMENTS = [(name, argument) for name, item in CLASSES.items() for argument in inspect.signature(item).parameters]
KEYS = sorted(
    {
        key.removesuffix("/")
        for path in CALLBACKS.glob("*.py")
        for key in re.findall(r'"(amp/[a-z0-9_/]+)"', path.read_text(encoding="utf-8"))
    }
)


def is_named(word: str, text: str) -> bool:
    """In code marks, alone or with what follows: `word`, `word=...`, `word/<metric>`."""
    return re.search(rf"`{re.escape(word)}(?![\w/]*\w/)[^\w`][^`]*`|`{re.escape(word)}`", text) is not None


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=lambda value: value)
def test_every_argument(name: str, argument: str) -> None:
    assert re.search(rf"^ +{argument}: \S", DOCSTRINGS[name], re.MULTILINE), "its docstring has no entry for it"


@pytest.mark.parametrize("key", KEYS)
def test_every_key(key: str) -> None:
    assert is_named(key, "\n".join(DOCSTRINGS.values())), f"no docstring names `{key}`"


def test_there_is_something_to_look_for() -> None:
    assert {"amp/loss_scale", "amp/diff", "amp/overflows"} <= set(KEYS)
    assert ("AmpPrecision", "fp32_modules") in ARGUMENTS
    assert not is_named("warn_bel", "`warn_below=0.1`")
    assert is_named("warn_below", "`warn_below=0.1`")
    assert is_named("amp/diff", "`amp/diff/<metric>`")
