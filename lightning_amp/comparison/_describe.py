"""A value as a text that is the same in every process: no addresses, no order of sets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


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
        return "{" + ", ".join(f"{_describe(k, above)}: {_describe(v, above)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return ("[%s]" if isinstance(value, list) else "(%s)") % ", ".join(_describe(v, above) for v in value)
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_describe(v, above) for v in value)) + "}"
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else value
        return (
            f"tensor({list(value.shape)}, {value.dtype}, {_short_hash(bytes(data.tolist()) if value.numel() else b'')})"
        )
    if isinstance(value, partial):
        parts = [_describe(v, above) for v in (value.func, value.args, value.keywords)]
        return f"partial({', '.join(parts)})"
    name = getattr(value, "__qualname__", None)
    if name is not None:  # a class, a function, a method
        owner = getattr(value, "__self__", None)
        of = f" of {_describe(owner, above)}" if owner is not None and not isinstance(owner, type) else ""
        return f"{value.__module__}.{name}{of}"
    return _object(value, above)


def _object(value: Any, above: tuple[int, ...]) -> str:
    kind = type(value)
    text = repr(value)
    if kind.__repr__ is not object.__repr__ and not _ADDRESS.search(text) and not hasattr(value, "state_dict"):
        return f"{kind.__module__}.{text}" if text.startswith(f"{kind.__name__}(") else f"{kind.__qualname__}({text})"
    try:
        attributes = vars(value)
    except TypeError:
        return f"{kind.__module__}.{_ADDRESS.sub('', text)}"
    inside = ", ".join(f"{k}={_describe(v, above)}" for k, v in sorted(attributes.items()))
    return f"{kind.__module__}.{kind.__qualname__}({inside})"


def short(text: str, most: int = 120) -> str:
    """Write a text that a person reads, not longer than so many characters; with its hash where it was cut."""
    return text if len(text) <= most else f"{text[: most - 14]}... ({_short_hash(text.encode())})"


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
