"""True fp32 for code that casts to half precision by hand; and the same random numbers for both precisions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import final, override

from lightning_amp._compat import _aten, _modules
from lightning_amp._containers import to_fp32
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.tracing._conditions import full_precision


@contextmanager
def fp32_throughout(device_type: str) -> Generator[None]:
    """Compute in :func:`full_precision`, and in float32 where the code asks for half precision.

    Casts to half precision (`x.half()`, `x.to(weight.dtype)`, an autocast region of the user's own) leave their values
    as they are. New tensors in half precision are float32. A half-precision tensor from elsewhere enters each operation
    as float32.
    """
    with full_precision(device_type), _WithoutHalves():
        yield


@final
class _WithoutHalves(_modules.DispatchMode):
    """Puts float32 in the place of half precision, in each operation, backwards included.

    Below autograd, so that it also holds for what activation checkpointing runs again, inside of TorchScript, and for
    autocast. An argument that an operation views or writes keeps its dtype: a copy would lose what is written.
    """

    supports_higher_order_operators = True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_drawn(func):  # other numbers in another dtype
            return func(*args, **kwargs)
        if func is torch.ops.aten.view.dtype or getattr(func, "namespace", "") == "c10d":
            return func(*args, **kwargs)  # the first reads bits, the others write what their schemas do not tell
        kept = _aten.viewed_or_written(func)
        fp32_args = tuple(a if i in kept else _in_fp32(a) for i, a in enumerate(args))
        fp32_kwargs = {name: a if name in kept else _in_fp32(a) for name, a in kwargs.items()}
        result = func(*fp32_args, **fp32_kwargs)
        if getattr(func, "overloadpacket", None) is torch.ops.aten.to and result is args[0]:
            # Inference mode has casts in one piece. One that is left out is a copy all the same, which may be edited.
            return result.clone()
        return result


@final
class Fp32Draws(_modules.DispatchMode):
    """Context in which random numbers like a half-precision tensor are those like a float32 one, rounded.

    On the CPU `torch.randn_like(x)` draws other numbers for another dtype of `x`. A step in mixed precision and the
    same step in fp32 would differ by that noise.
    """

    supports_higher_order_operators = True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        like = args[0] if args else None
        if not isinstance(like, Tensor) or like.dtype not in HALF_DTYPES or not _is_drawn(func):
            return func(*args, **kwargs)
        if kwargs.get("dtype") is not None:  # the same in both precisions
            return func(*args, **kwargs)
        if func.overloadpacket.__name__.endswith("_like"):
            return func(like.float(), *args[1:], **kwargs).to(like.dtype)
        if _aten.viewed_or_written(func):  # in place
            return like.copy_(func(like.float(), *args[1:], **kwargs))
        return func(*args, **kwargs)


def _is_drawn(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _in_fp32(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return torch.float32 if argument in HALF_DTYPES else argument
    return to_fp32(argument, HALF_DTYPES) if isinstance(argument, (Tensor, list, tuple)) else argument
