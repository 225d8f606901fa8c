"""Which plugin a strategy takes, said in words that name it."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceXLAStrategy, XLAStrategy

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


def hint(plugin: Any) -> str:
    """For the messages of strategies that refuse a plugin before it hears of them: "... found {plugin}"."""
    hints: list[str] = []
    if not isinstance(plugin, FSDPPrecision):
        hints.append(f"for FSDP use `lightning_amp.FSDP{_arguments(plugin)}`")
    if "torch_xla" in sys.modules:
        hints.append(_XLA)
    return f" ({'; '.join(hints)})" if hints else ""


def _arguments(plugin: Any) -> str:
    """The plugin as it would be written; a user's subclass by the name of ours."""
    name = "FSDPAmpPrecision" if isinstance(plugin, FSDPPrecision) else "AmpPrecision"
    return repr(plugin).replace(type(plugin).__name__, name, 1)
