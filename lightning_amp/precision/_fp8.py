"""Turn fp8 on for one fit: choose the layers, and log their number and the settings that slow them down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
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
    """The linear layers of modules that multiply in fp8 while they train.

    Args:
        forwards: The contexts of the modules, which enter the layers' contexts from now on.
        recipe: A recipe of torchao.
        device: The device of the modules.
        is_first: Whether it is an error if no layer qualifies, and whether settings that are slow are warned about.
        may_unfreeze: Whether layers that are frozen now may be trained later.

    Attributes:
        layers: Each `nn.Linear` by its name: `None`, or the reason why it is not in fp8.
        summaries: For each module with such layers, how many run in fp8.

    Raises:
        ValueError: If no layer qualifies.
        ImportError: Without a recent torchao.

    """

    def __init__(
        self,
        forwards: Sequence[ForwardContexts],
        recipe: Any,
        device: torch.device,
        *,
        is_first: bool = True,
        may_unfreeze: bool = False,
    ) -> None:
        chosen = [choose_fp8_layers(f.module, f.fp32_modules.modules, recipe, device) for f in forwards]
        self.layers = {name: why for layers in chosen for name, why in layers.items()}
        names = [may_run_in_fp8(layers) for layers in chosen]
        self._first, self._recipe, self._device_type = names[0] if names else set(), recipe, device.type
        found = [fp8_summary(f.module, layers, recipe) for f, layers in zip(forwards, chosen, strict=True)]
        self.summaries = [summary for summary in found if summary]
        if is_first and not (self.summaries or (any(names) and may_unfreeze)):
            raise ValueError(
                f"{nothing_qualifies(forwards[0].module, self.layers)}\nUse precision 'bf16', or see"
                " `docs/guide/fp8.md`, which says what a layer needs."
            )
        if is_first:
            _warn_if_slow([f.module for f in forwards], recipe, device)
        for f, its_names in zip(forwards, names, strict=True):
            if its_names:
                f.fp8_layers = linears_in_fp8(f.module, its_names, recipe, device.type, f)

    def on(self, copy: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the layers of a copy of the first module multiply in fp8, under autocast."""
        return linears_in_fp8(copy, self._first, self._recipe, self._device_type, SimpleNamespace(in_fp8=True))


def _warn_if_slow(modules: Sequence[nn.Module], recipe: Any, device: torch.device) -> None:
    if emulates(recipe):
        _messages.warn(
            "lightning_amp: fp8 is emulated (`emulate=True`): values are rounded to 8 bits and multiplied in float32."
            " The accuracy is as on a device with fp8, but a step is slower than in bf16."
        )
    elif device.type == "cuda" and not any(_modules.is_compiled(part) for m in modules for part in m.modules()):
        _messages.warn(
            "lightning_amp: fp8 without `torch.compile` is slower than bf16, since the casts are kernels of their own."
            " Compile the module, or the blocks that repeat in it: `for block in self.blocks: block.compile()` in"
            " `__init__`."
        )
