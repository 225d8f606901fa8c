"""Convert a module that was loaded in half precision to float32 for training, for the argument `upcast_parameters`.

The strategy passes the module to the plugin late. Callbacks have copied it in `setup`, and on one device and in DDP a
checkpoint has been loaded into it, rounded. So averages are upcast too, and the weights of the checkpoint are loaded
again before an optimizer or a hook of the fit reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_amp import _messages
from lightning_amp._compat import _lightning, _modules
from lightning_amp._text import counted, memory, named
from lightning_amp.numerics import HALF_DTYPES


def upcast(module: LightningModule) -> None:
    """Make trainable half-precision parameters of a module float32 at the start of a fit.

    If some of them are sharded already, it changes nothing and raises a `ValueError`.
    """
    half = trained_in_half(module)
    if not half:
        return
    sharded = [name for name in sharded_parameters(module) if name in half]
    if sharded:
        raise ValueError(
            f"lightning_amp: `upcast_parameters=True` cannot upcast parameters that are sharded already:"
            f" {_names(sharded)}. {_before_sharding(sharded)}."
        )
    checkpoint, strategy = _lightning.loaded_checkpoint(module.trainer), module.trainer.strategy
    loaded = bool(checkpoint) and not strategy.restore_checkpoint_after_setup
    result = upcast_parameters(module, keep=loaded)
    _lightning.set_half_modules_float(module, result.parameters)
    averages = _lightning.averages(module.trainer)
    for _, average in averages:
        upcast_like(average, module)
    if loaded:
        _load_again(module, checkpoint, result, averages)
    _say(module, half, result)


def trained_in_half(module: Any) -> dict[str, str]:
    """Return the names of trainable half-precision parameters, each with the name of its dtype."""
    half = {n: p.dtype for n, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in half.items()}


def advice(module: LightningModule, names: list[str]) -> str:
    """Return what the user can do to make these parameters float32, as a sentence without its full stop."""
    sharded = sharded_parameters(module)
    if isinstance(module.trainer.strategy, FSDPStrategy):
        if any(name in sharded for name in names):
            return _before_sharding(names, "wrapping it")
        return f"Write `{_part(names)}.float()` at the end of `__init__`, or at the start of `configure_model`"
    if any(name in sharded for name in names):
        return _before_sharding(names)
    return (
        "Pass `upcast_parameters=True` to the plugin, or call `.float()` on the module (or load it with"
        " `dtype=torch.float32`), or freeze these parameters with `requires_grad_(False)`"
    )


def _before_sharding(names: list[str], what: str = "`fully_shard(...)`") -> str:
    return f"Write `{_part(names)}.float()` at the start of `configure_model`, before {what}"


def _part(names: list[str]) -> str:
    """Return as code the part of the user's module that holds all these parameters: `self`, or one child of it."""
    first = {_modules.plain_name(name).partition(".")[::2] for name in names}
    children = {child for child, rest in first if rest}
    return f"self.{children.pop()}" if len(children) == 1 and all(rest for _, rest in first) else "self"


def _names(names: list[str]) -> str:
    return named([_modules.plain_name(name) for name in names])


def _load_again(
    module: LightningModule, checkpoint: dict[str, Any], result: Upcast, averages: list[tuple[Any, Any]]
) -> None:
    """Load the checkpoint's weights once more, by the same methods, which may rename keys and leave some out."""
    current = _lightning.weights_beside_averages(checkpoint, [callback for callback, _ in averages])
    state = {**checkpoint, "state_dict": current}
    module.trainer.strategy.load_model_state_dict(state, strict=module.strict_loading)
    mend_rounding(result.before)  # changes that a callback has made since then are kept
    for callback, average in averages:
        _lightning.load_average(callback, average, checkpoint)


def _say(module: LightningModule, half: dict[str, str], result: Upcast) -> None:
    dtypes = " and ".join(sorted(set(half.values())))
    values = f"{counted(len(half), f'trainable {dtypes} parameter')} ({counted(result.num_values, 'value')})"
    buffers = f", and {counted(result.num_buffers, 'buffer')} with them" if result.num_buffers else ""
    frozen = sum(p.dtype in HALF_DTYPES for p in module.parameters())
    verb = "stays" if frozen == 1 else "stay"
    stay = f" {counted(frozen, 'frozen parameter')} {verb} in half precision." if frozen else ""
    _messages.info(
        f"lightning_amp: {values} became float32{buffers}: {memory(result.num_bytes)} more, plus gradients and"
        f" optimizer state in float32.{stay}"
    )


# -- in place --------------------------------------------------------------------------------------------------------


class Upcast(NamedTuple):
    """The result of :func:`upcast_parameters`."""

    parameters: set[nn.Parameter]
    before: dict[nn.Parameter, Tensor]
    """The half-precision values of the parameters, if the caller asked to keep them."""
    num_buffers: int
    num_values: int
    """Number of values of the parameters. A lazy module has no values yet."""
    num_bytes: int
    """Additional bytes of parameters and buffers, without gradients and optimizer state."""


def upcast_parameters(module: nn.Module, *, keep: bool = False) -> Upcast:
    """Make trainable fp16 and bf16 parameters float32, one after the other; leave frozen ones alone.

    The parameters stay the same objects, so that ties, parameter groups and hooks hold. Their gradients become float32
    with them, and so do half-precision buffers of the same parts of the module: BatchNorm does not accept bfloat16
    statistics together with float32 weights. A buffer belongs to the innermost module around it that has parameters.
    The buffer stays unchanged if none of these parameters is upcast. With `keep` the result holds the old values, and
    their memory.
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
    """Find each half-precision buffer of the parts of a module whose parameters are upcast."""
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
    """Make half-precision tensors of a copy of a module float32 where the module has float32."""
    theirs = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
        like = theirs.get(name)
        if like is not None and tensor.dtype in HALF_DTYPES and like.dtype == torch.float32:
            tensor.data = tensor.data.float()


def mend_rounding(before: dict[nn.Parameter, Tensor]) -> None:
    """Copy the half-precision values `before` into upcast parameters, except where the new values round to them."""
    for parameter, rounded in before.items():
        if not is_lazy(parameter) and not torch.equal(parameter.data.to(rounded.dtype), rounded.to(parameter.device)):
            parameter.data.copy_(rounded)


def sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Find the parameters that `fully_shard` (FSDP2) or FSDP1 has sharded, whose dtype cannot change any more."""
    # a package that is not imported has created no averages
    tensor, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
    wrapped: set[nn.Parameter] = set()
    if fsdp is not None:
        wrappers = [m for m in module.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
        wrapped = {parameter for wrapper in wrappers for parameter in wrapper.parameters()}
    named = module.named_parameters()
    return {n: p for n, p in named if p in wrapped or (tensor is not None and isinstance(p, tensor.DTensor))}
