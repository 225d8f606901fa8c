"""What casts to fp8 lose of the gradients that reach the layers which multiply in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp.casting import gradient_cast, linear_layers, may_run_in_fp8


@final
class Float8Losses:
    """Context in which the gradients that reach the fp8 layers of a training step are looked at.

    Args:
        module: A copy of the module whose step runs in fp32: its gradients are the true ones.
        plugin: Knows which layers run in fp8; any other than ours has none.

    Attributes:
        counts: By layer, for each of its calls, what :meth:`ScaledCast.losses` counts.

    """

    def __init__(self, module: nn.Module, plugin: Any) -> None:
        layers: dict[str, str | None] = dict(getattr(plugin, "fp8_layers", {}))
        self.counts: dict[str, list[Tensor]] = {}
        chosen = may_run_in_fp8(layers)
        self._layers = {n: m for n, m in linear_layers(module).items() if n in chosen and m.weight.requires_grad}
        self._cast = gradient_cast(plugin.fp8_recipe) if self._layers else None
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, layer in self._layers.items():

            def watch(layer: nn.Module, args: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled():
                    self._handles.append(output.register_hook(lambda gradient: self._arrived(name, gradient)))

            self._handles.append(layer.register_forward_hook(watch))

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arrived(self, name: str, gradient: Tensor) -> None:
        assert self._cast is not None
        self.counts.setdefault(name, []).append(self._cast.losses(gradient))
