"""Turn fp8 on for one fit: choose the layers, and log their number and the settings that slow them down."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp._text import counted, named, percent
from lightning_amp.casting import (
    Float8Linears,
    choose_fp8_layers,
    emulates,
    may_run_in_fp8,
    name_of,
    needs_whole_tiles,
    nothing_qualifies,
    num_converted,
    share_of_flops,
)
from lightning_amp.precision._forward import ForwardContexts


@final
class Fp8:
    """The linear layers of a module that multiply in fp8 while it trains.

    `layers` has each `nn.Linear` by its name: `None`, or the reason why it is not in fp8. If no layer qualifies, it
    raises a `ValueError`; without a recent torchao, an `ImportError`.
    """

    def __init__(self, module: LightningModule, forward: ForwardContexts, recipe: Any, device: torch.device) -> None:
        self.layers = choose_fp8_layers(module, forward.fp32_modules.modules, recipe, device)
        self._names, self._recipe, self._device_type = may_run_in_fp8(self.layers), recipe, device.type
        self._linears = Float8Linears(module, self._names, recipe, device.type, forward)
        forward.use_fp8(self._linears)
        unfreezes = any(isinstance(callback, BaseFinetuning) for callback in module.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        if not (has_fp8(module, self.layers) or (self._names and unfreezes)):
            raise ValueError(
                f"{nothing_qualifies(module, self.layers)}\nUse precision 'bf16', or see `docs/guide/fp8.md`, which"
                " says what a layer needs."
            )
        self.summary = summarize(module, self.layers, recipe)
        warn_about(recipe)
        _warn_without_compiler(module, recipe, device)

    def finish(self) -> None:
        """Name at the end of a fit the layers that never ran in fp8."""
        idle = [name for name in self._linears.idle() if self.layers[name] is None]
        if idle and len(idle) < sum(1 for why in self.layers.values() if why is None):
            _messages.info(
                f"lightning_amp: {named(idle)} could multiply in fp8, but the `forward` there has not run in a training"
                " step. Code that uses the weight itself computes in bf16."
            )

    def on(self, copy: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the layers of a copy of the module multiply in fp8, under autocast."""
        return Float8Linears(copy, self._names, self._recipe, self._device_type, _Training())


@final
class _Training:
    in_fp8 = True


def has_fp8(module: nn.Module, layers: Mapping[str, str | None]) -> bool:
    """Return whether any layer was chosen, or converted by the user."""
    return None in layers.values() or num_converted(module) > 0


def summarize(module: nn.Module, layers: Mapping[str, str | None], recipe: Any) -> str:
    """Say how many of the linear layers multiply in fp8, and which share of their FLOPs that is."""
    num_chosen, converted = sum(1 for why in layers.values() if why is None), num_converted(module)
    text = (
        f"fp8 products in {num_chosen} of {counted(len(layers), 'linear layer')} (about"
        f" {percent(share_of_flops(module, layers))} of their FLOPs, {name_of(recipe)})"
    )
    return f"{text} in addition to {converted} that you converted yourself" if converted else text


def warn_about(recipe: Any) -> None:
    """Warn of a recipe that is slow, or fails for some batches."""
    if emulates(recipe):
        _messages.warn(
            "lightning_amp: fp8 is emulated (`emulate=True`): values are rounded to 8 bits and multiplied in float32."
            " The accuracy is as on a device with fp8, but a step is slower than in bf16."
        )
    elif needs_whole_tiles(recipe):
        _messages.warn(
            "lightning_amp: with `pad_inner_dim=False` a batch whose rows are not a multiple of 16 (often the last"
            " batch of an epoch) fails in the backward. Set it to `True` in `fp8_recipe`, or pass `drop_last=True` to"
            " the loader."
        )


def _warn_without_compiler(module: LightningModule, recipe: Any, device: torch.device) -> None:
    if device.type == "cuda" and not emulates(recipe) and not any(map(_modules.is_compiled, module.modules())):
        _messages.warn(
            "lightning_amp: fp8 without `torch.compile` is slower than bf16, since the casts are kernels of their own."
            " Compile the module, or the blocks that repeat in it: `for block in self.blocks: block.compile()` in"
            " `__init__`."
        )
