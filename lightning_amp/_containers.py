"""Half-precision tensors in whatever container a user passes around, as float32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_amp.numerics import HALF_DTYPES


def to_fp32(data: Any) -> Any:
    """`data` with its float16 and bfloat16 tensors as float32; everything else is left alone.

    Looks into lists, tuples (named ones too), dictionaries and their likes, and dataclasses, frozen or not. What holds
    no half-precision tensor comes back as the same object; what does is copied: the caller's own is not changed.
    """
    if isinstance(data, Tensor):
        return data.to(torch.float32) if data.dtype in HALF_DTYPES else data
    if isinstance(data, (list, tuple)):
        items = [to_fp32(item) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*items)
        return type(data)(items)
    if isinstance(data, Mapping):
        changed = _changed(data)
        if not changed:
            return data
        if type(data) is dict:
            return {**data, **changed}
        result: Any = copy.copy(data)  # keeps the type, and what it has besides items
        for key, value in changed.items():
            result[key] = value
        return result
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = dataclasses.fields(data)
        changed = _changed({field.name: getattr(data, field.name, None) for field in fields})
        if not changed:
            return data
        result = copy.copy(data)  # `dataclasses.replace` would run `__post_init__` again
        for name, value in changed.items():
            object.__setattr__(result, name, value)
        return result
    return data


def _changed(data: Mapping[Any, Any]) -> dict[Any, Any]:
    # A loop, since `torch.compile` cannot trace the same as a comprehension with `:=`.
    changed: dict[Any, Any] = {}
    for key, old in data.items():
        new = to_fp32(old)
        if new is not old:
            changed[key] = new
    return changed
