"""Turn fp8 on for one fit: choose the layers, and log their number and the settings that slow them down."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._compat import _modules
from lightning_amp.casting import (
    choose_fp8_layers,
    emulates,
    fp8_summary,
    linears_in_fp8,
    may_run_in_fp8,
    nothing_qualifies,
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
        forward.use_fp8(linears_in_fp8(module, self._names, recipe, device.type, forward))
        unfreezes = any(isinstance(callback, BaseFinetuning) for callback in module.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        self.summary = fp8_summary(module, self.layers, recipe)
        if not (self.summary or (self._names and unfreezes)):
            raise ValueError(
                f"{nothing_qualifies(module, self.layers)}\nUse precision 'bf16', or see `docs/guide/fp8.md`, which"
                " says what a layer needs."
            )
        warn_about(recipe)
        _warn_without_compiler(module, recipe, device)

    def on(self, copy: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the layers of a copy of the module multiply in fp8, under autocast."""
        return linears_in_fp8(copy, self._names, self._recipe, self._device_type, SimpleNamespace(in_fp8=True))


def warn_about(recipe: Any) -> None:
    """Warn of a recipe that is slow."""
    if emulates(recipe):
        _messages.warn(
            "lightning_amp: fp8 is emulated (`emulate=True`): values are rounded to 8 bits and multiplied in float32."
            " The accuracy is as on a device with fp8, but a step is slower than in bf16."
        )


def _warn_without_compiler(module: LightningModule, recipe: Any, device: torch.device) -> None:
    if device.type == "cuda" and not emulates(recipe) and not any(map(_modules.is_compiled, module.modules())):
        _messages.warn(
            "lightning_amp: fp8 without `torch.compile` is slower than bf16, since the casts are kernels of their own."
            " Compile the module, or the blocks that repeat in it: `for block in self.blocks: block.compile()` in"
            " `__init__`."
        )
