"""`upcast_parameters`: a module that was loaded in half precision is trained as one that was loaded in float32.

The strategy hands the module over after everybody has had a look at it: callbacks have copied it in `setup`, and on one
device and in DDP a checkpoint is loaded already, its float32 weights rounded. So averages are upcast too, and what the
checkpoint holds is loaded again, before an optimizer or a hook of the fit reads it.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import FSDPStrategy

from lightning_amp import _messages
from lightning_amp._compat import _lightning, _modules
from lightning_amp._text import counted, memory, named
from lightning_amp.casting import Upcast, mend_rounding, sharded_parameters, upcast_like, upcast_parameters
from lightning_amp.numerics import HALF_DTYPES


def upcast(module: LightningModule) -> None:
    """Make trainable half-precision parameters of a module float32, as `AmpPrecision` says, at the start of a fit.

    Raises:
        ValueError: If some of them are sharded already. Nothing is changed then.

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
    """Return the names of trainable half-precision parameters, each with that of its dtype."""
    half = {n: p.dtype for n, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in half.items()}


def advice(module: LightningModule, names: list[str]) -> str:
    """Return what makes these parameters float32, as a sentence without its full stop.

    Args:
        module: The user's.
        names: Of its trainable half-precision parameters.

    """
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
    """Return as code what holds all parameters with these names: a child of the user's module, or the whole."""
    first = {_modules.plain_name(name).partition(".")[::2] for name in names}
    children = {child for child, rest in first if rest}
    return f"self.{children.pop()}" if len(children) == 1 and all(rest for _, rest in first) else "self"


def _names(names: list[str]) -> str:
    return named([_modules.plain_name(name) for name in names])


def _load_again(
    module: LightningModule, checkpoint: dict[str, Any], result: Upcast, averages: list[tuple[Any, Any]]
) -> None:
    """Load the checkpoint's weights once more, by the same methods: they rename keys, and leave some out, as before."""
    current = _lightning.weights_beside_averages(checkpoint, [callback for callback, _ in averages])
    state = {**checkpoint, "state_dict": current}
    module.trainer.strategy.load_model_state_dict(state, strict=module.strict_loading)
    mend_rounding(result.before)  # what a callback changed since then stays as it made it
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
        f"lightning_amp: {values} became float32{buffers}: {memory(result.num_bytes)} more, beside gradients and"
        f" optimizer state in float32.{stay}"
    )
