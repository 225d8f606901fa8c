"""Write settings as text: for people, and as an identity, so that a later call finds the runs of the same settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from fsspec import AbstractFileSystem
from typing_extensions import final

_NO_SETTINGS = {"start_time"}  # the time at which a `SimpleProfiler` was made
_MOST_NUMBERS = 64  # of a tensor; Lightning's callbacks hold tensors with one number
_UNNAMED = re.compile(r"<[^<>]*?(\w+)(?: object)? at 0x\w+>|<class '(?:[^<>']*\.)?(\w+)'>")


def shown(value: Any) -> str:
    """Write a value for people: its `repr`, with names instead of addresses and dotted paths."""
    text = " ".join(_UNNAMED.sub(lambda found: found[1] or found[2], repr(value)).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def identity(value: Any) -> str:
    """Write a value with all its attributes. Equal settings have the same text in every process."""
    return _Writer().write(value, ())


def without_identity(value: Any) -> list[str]:
    """Return the types of parts whose objects all have the same text in :func:`identity`."""
    writer = _Writer()
    writer.write(value, ())
    return list(dict.fromkeys(writer.without_identity))


def main_path() -> str | None:
    """Return the path of the running script; `None` in a notebook or at a prompt."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return str(Path(path).resolve()) if path and Path(path).is_file() else None


@final
class _Writer:
    def __init__(self) -> None:
        self.without_identity: list[str] = []

    def write(self, value: Any, above: tuple[int, ...]) -> str:
        """Write a value; `above` are the ids of the values that contain it."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (str, bytes, int, float, complex)):
            return repr(value) if kind.startswith("builtins.") else f"{kind}({value!r})"
        if id(value) in above:
            return "..."
        above = (*above, id(value))
        if isinstance(value, Mapping):
            items = sorted(f"{self.write(key, above)}: {self.write(item, above)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, (list, tuple)):
            return ("[%s]" if isinstance(value, list) else "(%s)") % ", ".join(self.write(v, above) for v in value)
        if isinstance(value, (set, frozenset)):
            return f"set({', '.join(sorted(self.write(v, above) for v in value))})"
        if isinstance(value, partial):
            return f"partial{self.write((value.func, value.args, value.keywords), above)}"
        if hasattr(value, "__qualname__"):  # a class, a function, a method
            owner = getattr(value, "__self__", None)
            has_owner = owner is not None and not isinstance(owner, (type, ModuleType))
            script = main_path() if value.__module__ == "__main__" else None
            name = f"{Path(script).stem if script else value.__module__}.{value.__qualname__}"
            return f"{name} of {self.write(owner, above)}" if has_owner else name
        if isinstance(value, AbstractFileSystem):  # of a logger or callback; it holds a random token and credentials
            return kind
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_meta and value.numel() <= _MOST_NUMBERS:
                return f"tensor({value.tolist()}, {value.dtype})"
        elif hasattr(value, "__dict__"):
            attributes = {name: item for name, item in vars(value).items() if name not in _NO_SETTINGS}
            return f"{kind}{self.write(attributes, above)}"
        elif not _UNNAMED.search(repr(value)) and not getattr(
            value, "shape", ()
        ):  # the `repr` of a large array is shortened
            return f"{kind}({value!r})"
        self.without_identity.append(type(value).__qualname__)
        return kind
