"""Which plugin a strategy takes, said in words that name it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAStrategy,
)

_DEEPSPEED = (
    "DeepSpeed scales, casts and steps itself: leave the plugin out and write `Trainer(strategy=..., precision="
    "'bf16-mixed')` (or '16-mixed'), for which Lightning takes its own `DeepSpeedPrecision`"
)
_XLA = (
    "XLA casts the whole program itself: leave the plugin out and write `Trainer(precision='bf16-true')` (or"
    " '32-true'), for which Lightning takes its own `XLAPrecision`"
)


def check(plugin: Any, strategy: Any) -> None:
    """Whether this plugin is for this strategy.

    Raises:
        TypeError: Naming the plugin that is.

    """
    sharded = isinstance(plugin, FSDPPrecision)
    if isinstance(strategy, DeepSpeedStrategy):
        fix = _DEEPSPEED
    elif isinstance(strategy, (XLAStrategy, SingleDeviceXLAStrategy)):
        fix = _XLA
    elif isinstance(strategy, FSDPStrategy) and not sharded:
        fix = f"use `lightning_amp.FSDP{_arguments(plugin)}`"
    elif sharded and not isinstance(strategy, FSDPStrategy):
        fix = (
            f"use `lightning_amp.{_arguments(plugin).removeprefix('FSDP')}`, which takes the same arguments except"
            " `reduce_dtype` (it is for FSDP2, `ModelParallelStrategy`, too), or the strategy 'fsdp'"
        )
    else:
        return
    raise TypeError(f"`{plugin!r}` cannot be used with `{type(strategy).__name__}`: {fix}.")


def hint(plugin: Any, formats: FrameType | None) -> str:
    """For the messages of strategies that refuse a plugin before it hears of them: "... found {plugin}".

    Nobody asks the plugin then but its own `__format__`, which is also what every other message calls. So it looks who
    formats it: a method of a strategy refuses.

    Args:
        plugin: That is refused, or just mentioned.
        formats: The frame whose f-string it is.

    """
    owner = None if formats is None else formats.f_locals.get("self")
    if isinstance(owner, FabricStrategy):
        return f" ({_in_fabric(plugin)})"
    if not isinstance(owner, Strategy):
        return ""
    hints: list[str] = []
    if not isinstance(plugin, FSDPPrecision):
        hints.append(f"for FSDP use `lightning_amp.FSDP{_arguments(plugin)}`")
    if "torch_xla" in sys.modules:
        hints.append(_XLA)
    return f" ({'; '.join(hints)})" if hints else ""


def require_trainer(plugin: Any, module: Any) -> None:
    """Refuse Fabric, which takes any precision plugin, and whose loops have no step that this one could own.

    Raises:
        TypeError: Naming what Fabric takes instead.

    """
    if not isinstance(module, LightningModule) or module.fabric is not None or not _has_trainer(module):
        raise TypeError(
            f"`{plugin!r}` is a plugin for `L.Trainer`, which owns the optimizer step; {_in_fabric(plugin)}."
        )


def _has_trainer(module: LightningModule) -> bool:
    try:
        return isinstance(module.trainer, Trainer)
    except RuntimeError:  # Lightning's, if there is none
        return False


def _in_fabric(plugin: Any) -> str:
    text = "in Fabric, where you write the step yourself, use"
    if plugin.precision != "16-mixed":
        return f"{text} `L.Fabric(precision={plugin.precision!r})`"
    scaler = f"plugins=[MixedPrecision('16-mixed', {plugin.device!r}, DynamicLossScaler())]"  # the CPU takes no string
    return (
        f"{text} `L.Fabric({scaler})` with `lightning.fabric.plugins.MixedPrecision` and"
        " `lightning_amp.DynamicLossScaler`"
    )


def _arguments(plugin: Any) -> str:
    """The plugin as it would be written; a user's subclass by the name of ours."""
    name = "FSDPAmpPrecision" if isinstance(plugin, FSDPPrecision) else "AmpPrecision"
    return repr(plugin).replace(type(plugin).__name__, name, 1)
