"""fp8: linear layers whose products run in 8 bits while a model trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules, _torchao
from lightning_amp.casting._float8_choice import linear_layers
from lightning_amp.casting._float8_recipes import config_of
from lightning_amp.casting._method_override import MethodOverride


class Stage(Protocol):
    """Knows what runs now."""

    @property
    def in_fp8(self) -> bool:
        """Return whether the model trains, in fp8."""
        ...


@final
class _Float8Forward(MethodOverride):
    """The `forward` of a linear layer: in fp8 while the model trains under bf16 autocast, else what it was.

    Evaluation, `fp32_modules`, regions without autocast and the fp32 shadows of callbacks therefore need no fp8.
    "Trains" is neither grad mode (activation checkpointing runs its first forward without) nor "inside of a training
    step" (its second runs in the backward).
    """

    def __init__(
        self,
        owner: nn.Module,
        twin: nn.Module,
        device_type: str,
        stage: Stage,
        inner: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(owner, "forward", inner)
        self.twin, self.device_type, self.stage = twin, device_type, stage

    @override
    def __call__(self, input: Tensor) -> Tensor:  # the name that `nn.Linear.forward` has
        if not self._in_fp8(input):
            return self.inner(input)
        values = input.to(torch.bfloat16)  # torchao's own cast looks at CUDA's autocast only
        if torch.compiler.is_compiling():
            return self.twin(values)
        return _torchao.float8_linear(self.twin, values)

    def _in_fp8(self, values: Tensor) -> bool:
        device_type, weight = self.device_type, _modules.own_parameters(self.twin).get("weight")
        return (
            self.stage.in_fp8
            and torch.is_autocast_enabled(device_type)
            and torch.get_autocast_dtype(device_type) == torch.bfloat16
            and weight is not None  # the user has put something else in its place: pruning
            and weight.requires_grad  # else a gradient would be computed that nobody asked for
            and weight.dtype in (torch.float32, torch.bfloat16)  # the second: FSDP2 gathers it so, if it is told to
            and values.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and values.device.type == device_type  # autocast is off elsewhere
            and values.numel() > 0
            and (torch.compiler.is_compiling() or not _modules.is_transformed_or_traced())
        )

    @property
    @override
    def replacement(self) -> Callable[..., Any]:
        return self.as_method()

    @override
    def for_copy(self, owner: Any, inner: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any]:
        # the copy of the twin has the copied layer's parameters: both find the same dictionary in the memo
        return _Float8Forward(owner, copy.deepcopy(self.twin, memo), self.device_type, self.stage, inner)


@final
class Float8Linears:
    """The linear layers of one module that multiply in fp8, until :meth:`remove`.

    Args:
        root: The module.
        layers: From :func:`choose_fp8_layers`.
        recipe: A checked one.
        device_type: Whose autocast to look at.
        stage: Says when the model trains in fp8.

    Raises:
        ImportError: Without torchao, or with one that is too old. Nothing is changed then.

    """

    def __init__(
        self, root: nn.Module, layers: Mapping[str, str | None], recipe: Any, device_type: str, stage: Stage
    ) -> None:
        config = config_of(recipe)
        every = linear_layers(root)
        chosen = [every[name] for name, why in layers.items() if why is None]
        self._overrides = [
            _Float8Forward(layer, _torchao.float8_twin(layer, config), device_type, stage) for layer in chosen
        ]
        for forward in self._overrides:
            forward.install()

    def remove(self) -> None:
        """Leave the layers as they were."""
        for forward in self._overrides:
            forward.restore()
        self._overrides = []
