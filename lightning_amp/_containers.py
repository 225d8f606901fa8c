"""Walk over batches, arguments and outputs in the containers of users."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def to_fp32(data: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    """Cast tensors of these dtypes to float32, wherever :func:`replace` finds them; leave everything else alone."""
    return replace(data, lambda v: v.to(torch.float32) if isinstance(v, Tensor) and v.dtype in dtypes else v)


def replace(data: Any, function: Callable[[Any], Any]) -> Any:
    """Replace each value by `function(value)`, and return the result; the caller's object is not changed.

    It searches lists, tuples (including named tuples) and other sequences, mappings, and dataclasses, frozen or not. A
    container without replaced values is returned unchanged; others are copied. Lightning's `apply_to_collection` copies
    all of them, and refuses frozen dataclasses.

    Args:
        data: A value or a container.
        function: Is called with each value, containers too. If it returns another object, that object is used, and its
            inside is not searched.

    """
    new = function(data)
    if new is not data or isinstance(data, (Tensor, str, bytes, range)):
        return new
    is_mapping, is_sequence, kind = isinstance(data, Mapping), isinstance(data, Sequence), type(data)
    if is_mapping or is_sequence:
        parts: Any = data.items() if is_mapping else enumerate(data)
    elif dataclasses.is_dataclass(kind):
        parts = [(field.name, getattr(data, field.name, None)) for field in dataclasses.fields(data)]
    else:
        return data
    changed: dict[Any, Any] = {}
    for key, old in parts:  # a loop, because `torch.compile` cannot trace a comprehension with `:=`
        new = replace(old, function)
        if new is not old:
            changed[key] = new
    if not changed:
        return data
    if is_sequence:
        items = [changed.get(i, item) for i, item in enumerate(data)]
        return kind(*items) if hasattr(data, "_fields") else kind(items)
    if kind is dict or (is_mapping and not isinstance(data, MutableMapping)):
        return kind({**data, **changed})
    result = copy.copy(data)  # keeps the type and the attributes; `dataclasses.replace` would run `__post_init__`
    for key, new in changed.items():
        if is_mapping:
            result[key] = new
        else:
            object.__setattr__(result, key, new)
    return result


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over tensors with their paths: in nested lists, tuples and mappings, and in attributes of objects."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{i}]")
    elif not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__"):
        yield from ((f"{path}.{name}", item) for name, item in vars(value).items() if isinstance(item, Tensor))
