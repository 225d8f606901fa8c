"""Settings as text, the same in every process: by them a later call knows whether a kept run is its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from fsspec import AbstractFileSystem
from typing_extensions import final

_NO_SETTINGS = {"start_time"}  # when a `SimpleProfiler` was made
_MOST_NUMBERS = 64  # of a tensor; callbacks of Lightning hold single ones


def describe(value: Any) -> str:
    """Write a value with all that it consists of; equal settings give equal texts."""
    return _Writer().write(value, ())


def without_text(value: Any) -> list[str]:
    """Return the types of what :func:`describe` cannot write, so that two different ones would have the same text."""
    writer = _Writer()
    writer.write(value, ())
    return list(dict.fromkeys(writer.without_text))


def short(text: str, most: int = 120) -> str:
    """Write a text that a person reads, not longer than so many characters; with its hash where it was cut."""
    return text if len(text) <= most else f"{text[: most - 14]}... ({_short_hash(text)})"


@final
class _Writer:
    def __init__(self) -> None:
        self.without_text: list[str] = []

    def write(self, value: Any, above: tuple[int, ...]) -> str:
        """Write a value that is a part of those `above`."""
        if value is None or isinstance(value, (bool, int, float, str, bytes, complex, torch.dtype, torch.device)):
            return repr(value)
        if id(value) in above:
            return "..."
        above = (*above, id(value))
        if isinstance(value, Mapping):
            items = sorted((self.write(k, above), self.write(v, above)) for k, v in value.items())
            return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
        if isinstance(value, (list, tuple)):
            return ("[%s]" if isinstance(value, list) else "(%s)") % ", ".join(self.write(v, above) for v in value)
        if isinstance(value, (set, frozenset)):
            return "{" + ", ".join(sorted(self.write(v, above) for v in value)) + "}" if value else "set()"
        if isinstance(value, partial):
            return f"partial({', '.join(self.write(v, above) for v in (value.func, value.args, value.keywords))})"
        name = getattr(value, "__qualname__", None)
        if name is not None:  # a class, a function, a method
            owner = getattr(value, "__self__", None)
            has_owner = owner is not None and not isinstance(owner, (type, ModuleType))
            return f"{value.__module__}.{name}{f' of {self.write(owner, above)}' if has_owner else ''}"
        return self._object(value, above)

    def _object(self, value: Any, above: tuple[int, ...]) -> str:
        """Write an object by its own `repr`, with a hash of its attributes; without a `repr` by the attributes."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, AbstractFileSystem):  # of a logger, a callback: holds a random token, and credentials
            return kind
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_meta and value.numel() <= _MOST_NUMBERS:
                return f"tensor({value.tolist()}, {value.dtype})"
            self.without_text.append("Tensor")
            return kind
        text, attributes = _own_text(value), getattr(value, "__dict__", {})
        settings = {name: attributes[name] for name in sorted(attributes) if name not in _NO_SETTINGS}
        inside = ", ".join(f"{name}={self.write(item, above)}" for name, item in settings.items())
        if text:
            return f"{text} ({_short_hash(inside)})" if inside else f"{type(value).__qualname__}({text})"
        if not hasattr(value, "__dict__"):
            self.without_text.append(type(value).__qualname__)
        return f"{kind}({inside})"


def _own_text(value: Any) -> str:
    """Return the `repr` of a value; empty where it differs from process to process, or leaves out a part (an array)."""
    if type(value).__repr__ is object.__repr__ or getattr(value, "shape", ()) != ():
        return ""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # it is the user's own
        return ""
    return "" if " at 0x" in text or "{" in text else text  # an address; a set has no order


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
