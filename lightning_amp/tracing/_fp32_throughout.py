"""Compute in true fp32 even code that casts to half precision by hand, and draw the same numbers in both precisions."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import final, override

from lightning_amp._compat import _modules
from lightning_amp._containers import to_fp32
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.tracing._conditions import full_precision
from lightning_amp.tracing._places import user_place

_NOTE = 'fp32 here leaves out casts to half precision ({}); `Trainer(precision="32-true")` keeps them, and may differ'


@contextmanager
def fp32_throughout(device_type: str, boundary: str = "", notes: list[str] | None = None) -> Generator[None]:
    """Compute in :func:`full_precision`, and in float32 where the code requests half precision.

    A cast to half precision (`x.half()`, `x.to(weight.dtype)`, the user's own autocast region) leaves the values as
    they are. New half-precision tensors are made in float32. A half-precision tensor from elsewhere enters each
    operation as float32.

    Args:
        device_type: Where the code computes.
        boundary: File of the code that runs the step; callers of that file are not reported as places.
        notes: Gets one sentence if a cast to half precision is left out, which names the first one.
    """
    with full_precision(device_type), _WithoutHalves(boundary, [] if notes is None else notes):
        yield


@final
class _WithoutHalves(_modules.DispatchMode):
    """Replaces half precision by float32 in each operation, also in backwards.

    It works below autograd, and therefore also for repeated forwards of activation checkpointing, TorchScript and
    autocast. An argument that an operation views or writes keeps its dtype: a write to a float32 copy would be lost.
    """

    supports_higher_order_operators = True

    def __init__(self, boundary: str, notes: list[str]) -> None:
        super().__init__()
        self._boundary, self._notes = boundary, notes

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kept = _kept(func)
        if kept is None:
            return func(*args, **kwargs)
        dtypes = () if self._notes else (one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype))
        if any(one in HALF_DTYPES for one in dtypes) and (place := user_place(self._boundary)) is not None:
            self._notes.append(_NOTE.format(place.short))
        fp32_args = [a if i in kept else _in_fp32(a) for i, a in enumerate(args)]
        fp32_kwargs = {name: a if name in kept else _in_fp32(a) for name, a in kwargs.items()}
        # Our function modes have already seen torch's own operations. Custom operations may run Python code.
        with _modules.outside_function_modes() if getattr(func, "namespace", "") == "aten" else nullcontext():
            result = func(*fp32_args, **fp32_kwargs)
        if getattr(func, "overloadpacket", None) is torch.ops.aten.to and result is args[0]:
            # In inference mode, a cast is a single operation. If a requested copy is left out with its cast, copy the
            # tensor, because code may edit it.
            return result.clone()
        return result


@functools.cache
def _kept(func: Any) -> frozenset[int | str] | None:
    """Return the arguments of an operation that keep their dtype; `None` if the operation runs unchanged.

    A view as another dtype reinterprets bits, so its argument must keep its dtype. Operations between ranks write
    arguments that their schema does not mark. Random numbers differ between dtypes.
    """
    if _is_drawn(func) or func is torch.ops.aten.view.dtype or getattr(func, "namespace", "") in ("c10d", "fsdp"):
        return None
    return _viewed_or_written(func)


@final
class Fp32Draws(_modules.DispatchMode):
    """Context that draws random numbers for a half-precision tensor in float32, and rounds them.

    On the CPU, the numbers that `torch.randn_like(x)` draws depend on the dtype of `x`. Without this context a step in
    mixed precision and the same step in fp32 would differ by that noise.
    """

    supports_higher_order_operators = True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        like = args[0] if args else None
        if not isinstance(like, Tensor) or like.dtype not in HALF_DTYPES or not _is_drawn(func):
            return func(*args, **kwargs)
        if kwargs.get("dtype") is not None:  # the same numbers in both precisions
            return func(*args, **kwargs)
        if func.overloadpacket.__name__.endswith("_like"):
            return func(like.float(), *args[1:], **kwargs).to(like.dtype)
        if _viewed_or_written(func):  # in place
            return like.copy_(func(like.float(), *args[1:], **kwargs))
        return func(*args, **kwargs)


def _is_drawn(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _in_fp32(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return torch.float32 if argument in HALF_DTYPES else argument
    return to_fp32(argument, HALF_DTYPES) if isinstance(argument, (Tensor, list, tuple)) else argument


@functools.cache
def _viewed_or_written(operation: Any) -> frozenset[int | str]:
    """Return the arguments, by position and by name, whose memory an operation returns or writes to.

    Remove when an operation's schema has a public name.
    """
    schema = getattr(operation, "_schema", None)  # a higher-order operator has no schema
    arguments = [] if schema is None else enumerate(schema.arguments)
    return frozenset(key for i, one in arguments if one.alias_info is not None for key in (i, one.name))
