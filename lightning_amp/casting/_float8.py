"""fp8: linear layers whose products run in 8 bits while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import final, override

from lightning_amp._compat import _modules, _torchao
from lightning_amp.casting._float8_choice import linear_layers
from lightning_amp.casting._float8_recipes import config_of
from lightning_amp.casting._method_override import MethodOverride, not_run


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
    "Trains" is not grad mode: activation checkpointing runs its first forward without. A copy of the layer (a teacher,
    an average) gets the plain method.
    """

    def __init__(self, owner: nn.Module, twin: Any, device_type: str, stage: Stage) -> None:
        super().__init__(owner, "forward")
        self.twin, self.device_type, self.stage = twin, device_type, stage
        self.lost_weight = _modules.Flag()

    @override
    def __call__(self, input: Tensor) -> Tensor:  # the name that `nn.Linear.forward` has
        if not self._in_fp8(input):
            return self.inner(input)
        self.note_call()
        # As rows: torchao cannot flatten what it has cast, if that is transposed. Its own cast to autocast's dtype
        # looks at CUDA's autocast only.
        rows = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
        if torch.compiler.is_compiling():
            output = self.twin(rows)
            if self.twin.bias is None:
                output = output.clone()  # else it cannot be edited in place; a compiler fuses this
        else:
            output = _torchao.float8_linear(self.twin, rows)
        return output.reshape(*input.shape[:-1], output.shape[-1])

    def _in_fp8(self, values: Tensor) -> bool:
        device_type, weight = self.device_type, _modules.own_parameters(self.twin).get("weight")
        if weight is None:  # the user has put something else in its place: pruning
            self.lost_weight.set()
            return False
        return (
            self.stage.in_fp8
            and torch.is_autocast_enabled(device_type)
            and torch.get_autocast_dtype(device_type) == torch.bfloat16
            and weight.requires_grad  # else a gradient would be computed that nobody asked for
            and weight.dtype in (torch.float32, torch.bfloat16)  # the second: FSDP2 gathers it so, if it is told to
            and values.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and values.device.type == device_type  # autocast is off elsewhere
            and values.layout == torch.strided
            and not values.is_nested
            and values.numel() > 0
            and (torch.compiler.is_compiling() or _is_ordinary())
        )

    @property
    @override
    def replacement(self) -> Callable[..., Any]:
        return self.as_method()


def _is_ordinary() -> bool:
    """Return whether nothing looks at operations that cannot see into those of fp8."""
    return not (_modules.is_transformed_or_traced() or _modules.in_forward_mode() or torch.is_inference_mode_enabled())


@final
class Float8Linears:
    """The linear layers of one module that multiply in fp8 inside of :meth:`inside`.

    Outside of training steps and backwards nothing is on the module, so that copies, exports and evaluations which a
    hook or a callback makes are those of a plain module.

    Args:
        root: The module.
        names: Of the layers, without what wrappers put in between.
        recipe: A checked one.
        device_type: Whose autocast to look at.
        stage: Says when the model trains in fp8.

    Raises:
        ImportError: Without torchao, or with one that is too old.

    Cost: a microsecond per layer and step to put them there and take them away.

    """

    def __init__(self, root: nn.Module, names: Collection[str], recipe: Any, device_type: str, stage: Stage) -> None:
        config = config_of(recipe)
        chosen = {name: layer for name, layer in linear_layers(root).items() if name in names}
        self._overrides = {
            name: _Float8Forward(layer, _torchao.float8_twin(layer, config), device_type, stage)
            for name, layer in chosen.items()
        }
        self._depth = 0

    @contextmanager
    def inside(self) -> Generator[None, None, None]:
        """Run what trains; may be entered inside of itself."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begin what :meth:`inside` does."""
        self._depth += 1
        if self._depth == 1:
            for forward in self._overrides.values():
                forward.install()

    def leave(self) -> None:
        """End it."""
        self._depth -= 1
        if self._depth == 0:
            for forward in self._overrides.values():
                forward.restore()

    def idle(self) -> list[str]:
        """Name the layers that have not multiplied in fp8."""
        return not_run(self._overrides)

    def replaced(self) -> list[str]:
        """Name the layers whose weight has not been a parameter of theirs in some step."""
        return [name for name, forward in self._overrides.items() if forward.lost_weight.is_set]
