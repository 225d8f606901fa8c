"""Batches for a step that computes in fp32."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.shadow._not_copied import NotCopied


def upcast_tensors(batch: Any) -> Any:
    """Turn half-precision tensors into float32 ones, however deep; containers and objects are changed in place.

    Outside of autocast a float32 weight and a bfloat16 input do not fit together.
    """
    return _upcast(batch, {})


def _upcast(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    if id(value) in memo:
        return memo[id(value)][1]
    result = value
    memo[id(value)] = (value, value)  # the first keeps the id from being used again
    if isinstance(value, Tensor):
        if value.dtype in HALF_DTYPES:
            result = value.detach().float().requires_grad_(value.requires_grad)
    elif isinstance(value, tuple):
        items = [_upcast(item, memo) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            result = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif isinstance(value, list):
        value[:] = [_upcast(item, memo) for item in value]
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            value[key] = _upcast(item, memo)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, NotCopied)):
        for name, item in list(vars(value).items()):
            vars(value)[name] = _upcast(item, memo)
    memo[id(value)] = (value, result)
    return result
