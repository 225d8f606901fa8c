"""Write settings as text: for people, and as an identity, so that a later call finds the runs of the same settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from fsspec import AbstractFileSystem
from typing_extensions import final

from lightning_amp._text import UNNAMED, literal

_NO_SETTINGS = {"start_time"}  # the time at which a `SimpleProfiler` was made
_MOST_NUMBERS = 64  # of a tensor; Lightning's callbacks hold tensors with one number


def factory_name(factory: Any) -> str:
    """Return the name that a person would write: `Net`, `make_net`, `Net(width=64)`."""
    if isinstance(factory, partial):
        named = (f"{name}={literal(value)}" for name, value in factory.keywords.items())
        return f"{factory_name(factory.func)}({', '.join([*map(literal, factory.args), *named])})"
    name = getattr(factory, "__qualname__", None) or literal(factory)
    name = name.rpartition("<locals>.")[2].replace("<lambda>", "lambda")
    return re.sub(r"^(\w+\.)+(?=\w+\()", "", name)  # a factory of the command line names its classes with their modules


@final
class Identity:
    """Writes values with all their attributes. Equal settings have the same text in every process.

    Attributes:
        unknown: Types of values that have the same text as other values.

    """

    def __init__(self) -> None:
        self.unknown: list[str] = []

    def of(self, value: Any, above: tuple[int, ...] = ()) -> str:
        """Write a value; `above` are the ids of the values that contain it."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (str, bytes, int, float, complex)):
            return repr(value) if kind.startswith("builtins.") else f"{kind}({value!r})"
        if id(value) in above:
            return "..."
        above = (*above, id(value))
        if isinstance(value, Mapping):
            items = sorted(f"{self.of(key, above)}: {self.of(item, above)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, (list, tuple)):
            return ("[%s]" if isinstance(value, list) else "(%s)") % ", ".join(self.of(v, above) for v in value)
        if isinstance(value, (set, frozenset)):
            return f"set({', '.join(sorted(self.of(v, above) for v in value))})"
        if isinstance(value, partial):
            return f"partial{self.of((value.func, value.args, value.keywords), above)}"
        if isinstance(value, CodeType):
            return self.of((value.co_code, value.co_consts, value.co_names), above)
        if hasattr(value, "__qualname__"):  # a class, a function, a method
            owner = getattr(value, "__self__", None)
            name = f"{value.__module__}.{value.__qualname__}"
            if isinstance(value, FunctionType) and "<" in name:  # a lambda or an inner function: by what it does
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
                name += self.of((value.__code__, value.__defaults__, cells), above)
            has_owner = owner is not None and not isinstance(owner, (type, ModuleType))
            return f"{name} of {self.of(owner, above)}" if has_owner else name
        if isinstance(value, AbstractFileSystem):  # of a logger or callback; it holds a random token and credentials
            return kind
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_meta and value.numel() <= _MOST_NUMBERS:
                return f"tensor({value.tolist()}, {value.dtype})"
        elif hasattr(value, "__dict__"):
            attributes = {name: item for name, item in vars(value).items() if name not in _NO_SETTINGS}
            return f"{kind}{self.of(attributes, above)}"
        elif not UNNAMED.search(repr(value)) and not getattr(value, "shape", ()):  # of a large array it is shortened
            return f"{kind}({value!r})"
        self.unknown.append(type(value).__qualname__)
        return kind
