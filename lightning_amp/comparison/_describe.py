"""A value as a text that is the same in every process: no addresses, no order of sets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from fsspec import AbstractFileSystem

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NO_SETTINGS = {"start_time"}  # when a `SimpleProfiler` was made


def describe(value: Any) -> str:
    """Write a value with all that it consists of; equal settings give equal texts."""
    return _describe(value, ())


def _describe(value: Any, above: tuple[int, ...]) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes, complex, torch.dtype, torch.device)):
        return repr(value)
    if id(value) in above:
        return "..."
    above = (*above, id(value))
    if isinstance(value, Mapping):
        items = sorted((_describe(k, above), _describe(v, above)) for k, v in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return ("[%s]" if isinstance(value, list) else "(%s)") % ", ".join(_describe(v, above) for v in value)
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_describe(v, above) for v in value)) + "}" if value else "set()"
    if isinstance(value, torch.Tensor):
        return f"tensor({list(value.shape)}, {value.dtype}, {_hash_of_tensor(value)})"
    if isinstance(value, partial):
        parts = [_describe(v, above) for v in (value.func, value.args, value.keywords)]
        return f"partial({', '.join(parts)})"
    name = getattr(value, "__qualname__", None)
    if name is not None:  # a class, a function, a method
        owner = getattr(value, "__self__", None)
        has_owner = owner is not None and not isinstance(owner, (type, ModuleType))
        return f"{value.__module__}.{name}{f' of {_describe(owner, above)}' if has_owner else ''}"
    return _object(value, above)


def _object(value: Any, above: tuple[int, ...]) -> str:
    """Write an object by its `repr` if it has one, else by its attributes; a stateful one with a hash of these."""
    kind, text = type(value), _repr(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, AbstractFileSystem):  # of a logger, a callback: holds a random token, and credentials
        return name
    if kind.__name__ == "ndarray":
        data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        return f"array({list(value.shape)}, {value.dtype}, {_short_hash(data)})"
    attributes = _attributes(value)
    may_vary = _ADDRESS.search(text) or is_dataclass(value) or (attributes and "{" in text)  # a set has no order
    tells = kind.__repr__ is not object.__repr__ and not may_vary
    if tells:
        text = f"{kind.__module__}.{text}" if text.startswith(f"{kind.__name__}(") else f"{kind.__qualname__}({text})"
        if not hasattr(value, "state_dict"):
            return text
    inside = ", ".join(f"{k}={_describe(v, above)}" for k, v in sorted(attributes.items()))
    if tells:
        return f"{' '.join(text.split())} ({_short_hash(inside.encode())})"
    if attributes or kind.__repr__ is object.__repr__:
        return f"{name}({inside})"
    return f"{kind.__module__}.{_ADDRESS.sub('', text)}"


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # it is the user's own
        return object.__repr__(value)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return {name: item for name, item in found.items() if name not in _NO_SETTINGS}


def _names(slots: Any) -> list[str]:
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__")]


def _hash_of_tensor(value: torch.Tensor) -> str:
    if value.is_meta:
        return "meta"
    data = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    data = data.cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return _short_hash(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")


def short(text: str, most: int = 120) -> str:
    """Write a text that a person reads, not longer than so many characters; with its hash where it was cut."""
    return text if len(text) <= most else f"{text[: most - 14]}... ({_short_hash(text.encode())})"


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
