"""Half-precision parameters of a module become float32, in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_amp.numerics import HALF_DTYPES


class Upcast(NamedTuple):
    """What :func:`upcast_parameters` did."""

    parameters: set[nn.Parameter]
    before: dict[nn.Parameter, Tensor]
    """The half-precision values that they had, if these were to be kept."""
    num_buffers: int
    num_values: int
    """Of the parameters. Those of a lazy module do not count: it has none as yet."""
    num_bytes: int
    """How much more memory parameters and buffers take, without gradients and optimizer state."""


def upcast_parameters(module: nn.Module, *, keep: bool = False) -> Upcast:
    """Make trainable fp16 and bf16 parameters float32, one after the other; frozen ones stay as they are.

    The parameters stay the same objects, so that ties, parameter groups and hooks hold; a gradient that is there
    becomes float32 with them. So do half-precision buffers of the same parts of the module, which
    `module.to(torch.bfloat16)` converted together with the parameters: BatchNorm takes no bfloat16 statistics beside
    float32 weights. A buffer belongs to the innermost module around it that has parameters, and stays if none of those
    is upcast.

    Args:
        module: Any.
        keep: Whether to keep the values that the parameters had, which takes their memory as long.

    """
    half = {p: None for p in module.parameters() if p.requires_grad and p.dtype in HALF_DTYPES}
    before = {parameter: parameter.data for parameter in half} if keep else {}
    buffers = list(_buffers_beside(module, set(half)))
    num_values = sum(p.numel() for p in half if not is_lazy(p))
    num_bytes = 2 * (num_values + sum(b.numel() for b in buffers if not is_lazy(b)))
    for parameter in half:
        parameter.data = parameter.data.float()
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.float()
    for buffer in buffers:
        buffer.data = buffer.data.float()
    return Upcast(set(half), before, len(buffers), num_values, num_bytes)


def _buffers_beside(module: nn.Module, upcast: set[nn.Parameter]) -> Iterator[Tensor]:
    """Find the half-precision buffers of those parts of a module whose parameters are upcast, each once."""
    seen: set[Tensor] = set()

    def visit(part: nn.Module, around: bool) -> Iterator[Tensor]:
        parameters = set(part.parameters())
        here = not upcast.isdisjoint(parameters) if parameters else around
        for buffer in part.buffers(recurse=False):
            if here and buffer.dtype in HALF_DTYPES and buffer not in seen:
                seen.add(buffer)
                yield buffer
        for child in part.children():
            yield from visit(child, here)

    return visit(module, False)


def upcast_like(copy: nn.Module, module: nn.Module) -> None:
    """Make float32 what is half precision in a copy of a module, and float32 in the module."""
    theirs = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
        like = theirs.get(name)
        if like is not None and tensor.dtype in HALF_DTYPES and like.dtype == torch.float32:
            tensor.data = tensor.data.float()


def mend_rounding(before: dict[nn.Parameter, Tensor]) -> None:
    """Put back what upcast parameters were, where they now hold something else than the unrounded values of it.

    Args:
        before: The half-precision values. Parameters that hold values which round to these keep them.

    """
    for parameter, rounded in before.items():
        if not is_lazy(parameter) and not torch.equal(parameter.data.to(rounded.dtype), rounded.to(parameter.device)):
            parameter.data.copy_(rounded)


def sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Find parameters whose dtype cannot change any more: shards, of `fully_shard` (FSDP2) and of FSDP1."""
    named = dict(module.named_parameters())
    # not imported: then there is none
    tensor, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
    wrapped: set[nn.Parameter] = set()
    if fsdp is not None:
        wrapped = set(_inside(m for m in module.modules() if isinstance(m, fsdp.FullyShardedDataParallel)))
    return {n: p for n, p in named.items() if p in wrapped or (tensor is not None and isinstance(p, tensor.DTensor))}


def _inside(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters()
