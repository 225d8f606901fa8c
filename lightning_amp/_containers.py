"""Walk over batches, arguments and outputs in the containers of users."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (list, tuple, dict)


def to_fp32(data: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    """Cast tensors of these dtypes to float32, wherever :func:`replace` finds them; leave everything else alone."""
    return replace(data, lambda v: v.to(torch.float32) if isinstance(v, Tensor) and v.dtype in dtypes else v)


def replace(data: Any, function: Callable[[Any], Any]) -> Any:
    """Replace each value by `function(value)`, and return the result; the caller's object is not changed.

    It searches lists, tuples (including named tuples) and other sequences, mappings, and dataclasses, frozen or not. A
    container without replaced values is returned unchanged; others are copied.

    Args:
        data: A value or a container.
        function: Is called with each value except plain lists, tuples and dictionaries. If it returns another object,
            that object is used, and its inside is not searched.

    """
    if type(data) not in _PLAIN:
        new = function(data)
        if new is not data or isinstance(data, (Tensor, str, bytes, range)):
            return new
    if isinstance(data, (list, tuple, Sequence)):
        items = [replace(item, function) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)  # pyright: ignore[reportCallIssue]
    if isinstance(data, (dict, Mapping)):
        changed = _changed(data, function)
        if not changed:
            return data
        if type(data) is dict or not isinstance(data, MutableMapping):
            return type(data)({**data, **changed})  # pyright: ignore[reportCallIssue]
        result: Any = copy.copy(data)  # a copy keeps the type and attributes of the mapping
        for key, value in changed.items():
            result[key] = value
        return result
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = dataclasses.fields(data)
        changed = _changed({field.name: getattr(data, field.name, None) for field in fields}, function)
        if not changed:
            return data
        result = copy.copy(data)  # `dataclasses.replace` would run `__post_init__` again
        for name, value in changed.items():
            object.__setattr__(result, name, value)
        return result
    return data


def _changed(data: Mapping[Any, Any], function: Callable[[Any], Any]) -> dict[Any, Any]:
    # A loop, because `torch.compile` cannot trace a comprehension with `:=`.
    changed: dict[Any, Any] = {}
    for key, old in data.items():
        new = replace(old, function)
        if new is not old:
            changed[key] = new
    return changed


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
