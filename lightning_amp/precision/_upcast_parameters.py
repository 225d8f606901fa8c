"""Convert a module that was loaded in half precision to float32 for training, for the argument `upcast_parameters`.

The strategy passes the module to the plugin late. Callbacks have copied it in `setup`, and on one device and in DDP a
checkpoint has been loaded into it, rounded. So averages are upcast too, and the weights of the checkpoint are loaded
again before an optimizer or a hook of the fit reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_amp import _messages
from lightning_amp._compat import _lightning, _modules, _sharding
from lightning_amp._compat._names import FSDPStrategy, LightningModule
from lightning_amp._text import counted, memory, named
from lightning_amp.numerics import HALF_DTYPES


def upcast(module: LightningModule) -> None:
    """Make trainable half-precision parameters of a module float32 at the start of a fit, and log one line.

    If some are sharded already, it changes nothing and raises a `ValueError`.
    """
    half = trained_in_half(module)
    if not half:
        return
    if sharded := [n for n, p in module.named_parameters() if n in half and _sharding.is_sharded(p)]:
        raise ValueError(
            "lightning_amp: `upcast_parameters=True` cannot upcast parameters that are sharded already:"
            f" {named([_modules.plain_name(name) for name in sharded])}. {advice(module, sharded)}."
        )
    checkpoint, strategy = _lightning.loaded_checkpoint(module.trainer), module.trainer.strategy
    loads_again = bool(checkpoint) and not strategy.restore_checkpoint_after_setup
    rounded = {p: p.data for p in half.values()} if loads_again else {}
    kinds = dtypes(half)
    parameters = [*half.values()]
    buffers = _buffers_beside(module, set(parameters))
    for tensor in (*parameters, *buffers):  # they stay the same objects, so that ties, parameter groups and hooks hold
        tensor.data = tensor.data.float()
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.float()
    _lightning.set_half_modules_float(module, set(parameters))
    averages = _lightning.averages(module.trainer)
    for _, average in averages:
        upcast_like(average, module)
    if loads_again:
        _load_again(module, checkpoint, rounded, averages)
    what = f"{counted(len(half), f'trainable {kinds} parameter')} ({counted(_size(parameters), 'value')})"
    also = f", and {counted(len(buffers), 'buffer')} with them" if buffers else ""
    frozen = counted(sum(p.dtype in HALF_DTYPES for p in module.parameters()), "frozen parameter")
    _messages.info(
        f"lightning_amp: {what} became float32{also}: {memory(2 * _size([*parameters, *buffers]))} more, plus gradients"
        f" and optimizer state in float32. Unchanged: {frozen} in half precision."
    )


def trained_in_half(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable half-precision parameters by their names."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES}


def dtypes(half: dict[str, nn.Parameter]) -> str:
    """Name the dtypes: `bfloat16`."""
    return " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in half.values()}))


def advice(module: LightningModule, names: list[str]) -> str:
    """Return what the user can do to make these parameters float32, as a sentence without its full stop."""
    if not isinstance(module.trainer.strategy, FSDPStrategy) and not _sharding.is_sharded_module(module):
        return (
            "Pass `upcast_parameters=True` to the plugin, or call `.float()` on the module (or load it with"
            " `dtype=torch.float32`), or freeze these parameters with `requires_grad_(False)`"
        )
    paths = {_modules.plain_name(name).partition(".")[::2] for name in names}
    children = {child if rest else "" for child, rest in paths}
    part = ".".join(["self", *children]) if len(children) == 1 and "" not in children else "self"
    return f"Write `{part}.float()` at the start of `configure_model`, before `fully_shard(...)` or `wrap(...)`"


def _load_again(
    module: LightningModule, checkpoint: dict[str, Any], rounded: dict[nn.Parameter, Tensor], averages: list[Any]
) -> None:
    """Load the checkpoint's weights once more, by the same methods, which may rename keys and leave some out."""
    weights = _lightning.weights_beside_averages(checkpoint, [callback for callback, _ in averages])
    state = {**checkpoint, "state_dict": weights}
    module.trainer.strategy.load_model_state_dict(state, strict=module.strict_loading)
    for parameter, before in rounded.items():  # a callback has changed a value that does not round to the loaded one
        if not is_lazy(parameter) and not torch.equal(parameter.data.to(before.dtype), before.to(parameter.device)):
            parameter.data.copy_(before)
    for callback, average in averages:
        _lightning.load_average(callback, average, checkpoint)


# -- in place --------------------------------------------------------------------------------------------------------


def _size(tensors: Iterable[Tensor]) -> int:
    """Return the number of values; a lazy module has none yet."""
    return sum(tensor.numel() for tensor in tensors if not is_lazy(tensor))


def _buffers_beside(module: nn.Module, upcast: set[nn.Parameter]) -> list[Tensor]:
    """Find each half-precision buffer of the parts of a module whose parameters are upcast.

    BatchNorm does not accept bfloat16 statistics together with float32 weights. A buffer belongs to the innermost
    module around it that has parameters. The buffer stays unchanged if none of these parameters is upcast.
    """
    found: dict[Tensor, None] = {}
    parts = dict(module.named_modules())
    for name, part in parts.items():
        around = name
        while around and not any(True for _ in parts[around].parameters()):
            around = around.rpartition(".")[0]
        if not upcast.isdisjoint(parts[around].parameters()):
            found.update((buffer, None) for buffer in part.buffers(recurse=False) if buffer.dtype in HALF_DTYPES)
    return [*found]


def upcast_like(copy: nn.Module, module: nn.Module) -> None:
    """Make half-precision tensors of a copy of a module float32 where the module has float32."""
    theirs = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
        like = theirs.get(name)
        if like is not None and tensor.dtype in HALF_DTYPES and like.dtype == torch.float32:
            tensor.data = tensor.data.float()
