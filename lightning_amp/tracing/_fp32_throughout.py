"""True fp32 for code that casts to half precision by hand; and the same random numbers for both precisions."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

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
        plan = _plan(func)
        if plan.passes:
            return func(*args, **kwargs)
        fp32_args = [a if i in plan.kept else _in_fp32(a) for i, a in enumerate(args)]
        fp32_kwargs = {name: a if name in plan.kept else _in_fp32(a) for name, a in kwargs.items()}
        # Below, no mode of ours sees operations again that it has seen above. Those of others may run Python code.
        with _modules.outside_function_modes() if plan.is_torchs else nullcontext():
            result = func(*fp32_args, **fp32_kwargs)
        if plan.is_cast and result is args[0]:
            # Inference mode has casts in one piece. One that is left out is a copy all the same, which may be edited.
            return result.clone()
        return result


@final
class _Plan(NamedTuple):
    """What is done with an operation.

    Attributes:
        passes: Nothing.
        kept: Arguments that keep their dtype.
        is_cast: Whether it is a cast in one piece.
        is_torchs: Whether it runs no Python code.

    """

    passes: bool
    kept: frozenset[int | str]
    is_cast: bool
    is_torchs: bool


@functools.cache
def _plan(func: Any) -> _Plan:
    namespace = getattr(func, "namespace", "")
    # A view as another dtype reads bits; what communicates writes what its schema does not tell; and random numbers
    # are others in another dtype.
    passes = _is_drawn(func) or func is torch.ops.aten.view.dtype or namespace == "c10d"
    is_cast = getattr(func, "overloadpacket", None) is torch.ops.aten.to
    return _Plan(passes, _aten.viewed_or_written(func), is_cast, namespace == "aten")


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
    if isinstance(argument, Tensor):
        return argument.to(torch.float32) if argument.dtype in HALF_DTYPES else argument
    if isinstance(argument, torch.dtype):
        return torch.float32 if argument in HALF_DTYPES else argument
    return to_fp32(argument, HALF_DTYPES) if isinstance(argument, (list, tuple)) else argument
