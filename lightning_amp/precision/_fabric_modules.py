"""Run the forwards of modules that Fabric has set up, and restore their buffers after a skipped step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._containers import replace
from lightning_amp.casting import (
    Choice,
    Rule,
    modules_matching,
)
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import _error_notes, _refusals
from lightning_amp.precision._forward import Context, ForwardContexts, Together, autocast
from lightning_amp.precision._fp8 import Fp8
from lightning_amp.scaling import StepResult
from lightning_amp.skipped_steps import KeptBuffers, matching_places, norm_places


def device_of(modules: Iterable[nn.Module], default: str) -> torch.device:
    """Return the device of the first parameter or buffer."""
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    return next((t.device for t in tensors), torch.device(default))


@final
class FabricModules:
    """All modules that Fabric has set up, in one precision.

    Attributes:
        forwards: The contexts of each module.
        skips: Whether steps may be skipped.
        fp8_layers: Each `nn.Linear` by its name: `None` if it runs in fp8, or the reason why not.

    """

    def __init__(
        self,
        choice: Choice,
        device: torch.device,
        fp32_modules: Sequence[Rule],
        restore_buffers: Sequence[str],
        fp8_recipe: Any,
        *,
        skips: bool,
    ) -> None:
        self.device, self.skips = device, skips
        self.fp8_layers: dict[str, str | None] = {}
        self._choice = choice
        self._autocast = partial(autocast, choice, device.type)
        self._rules, self._buffer_rules, self._fp8_recipe = fp32_modules, restore_buffers, fp8_recipe
        self.forwards: list[ForwardContexts] = []
        self._buffers: list[KeptBuffers] = []
        self._window_is_open = False

    @property
    def modules(self) -> list[nn.Module]:
        """Return the user's modules, inside of Fabric's wrappers."""
        return [forward.module for forward in self.forwards]

    def add(self, modules: Sequence[nn.Module]) -> list[str]:
        """Apply the settings to modules that were set up, and describe what runs in fp8.

        If one is refused, none is changed.
        """
        is_first = not self.forwards
        rules = _by_module(modules, self._rules, modules_matching, strict=is_first)
        buffers = _by_module(modules, self._buffer_rules, matching_places, strict=is_first)
        for module in modules if self._choice.mixed else ():
            _refusals.refuse_half_parameters(module, self._choice, lambda _: _BEFORE_SETUP)
        added: list[ForwardContexts] = []
        try:
            for module, its_rules in zip(modules, rules, strict=True):
                choices = self._choice, self._choice
                added.append(ForwardContexts(module, self.device.type, *choices, its_rules, self._autocast))
            fp8 = None
            if self._fp8_recipe is not None:
                fp8 = Fp8(added, self._fp8_recipe, self.device, is_first=is_first, stage=lambda f: _Stage(f.module))
                self.fp8_layers |= fp8.layers
        except BaseException:
            for forward in added:
                forward.detach()
            raise
        for module, its_buffers in zip(modules, buffers, strict=True):
            both = (norm_places(module), True), (matching_places(module, its_buffers), False)
            kept = [KeptBuffers(module, found, counted=counted) for found, counted in both if found]
            self._buffers += kept if self.skips else []
        self.forwards += added
        return [] if fp8 is None else fp8.summaries

    # -- forward and backward ------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Copy buffers if a step begins.

        A step begins with the first forward in training mode, which may be a teacher's, without gradients.
        """
        if self._buffers and not self._window_is_open and any(module.training for module in self.modules):
            self._window_is_open = True
            for buffers in self._buffers:
                buffers.enter_step()

    def forward(self) -> Context:
        """Return the context of a forward in the precision of the plugin."""
        step = "training_step" if torch.is_grad_enabled() else "validation_step"
        return self._together(step, "the forward", self._autocast())

    def end_forward(self, data: Any) -> Any:
        """Return the outputs in float32, except a float16 loss, at which the loss scale must not exceed 65504."""
        return replace(data, _to_fp32) if self._choice.mixed else data

    def backward(self) -> Context:
        """Return the context of a backward."""
        return self._together(None, "the backward")

    def _together(self, step: str | None, name: str, *inside: Context) -> Together:
        def end(error: BaseException | None) -> None:
            if error is not None:
                _error_notes.note(error, self._choice, self.modules, name)

        around = [context for forward in self.forwards for context in forward.around(step)]
        return Together([_modules.compiled_backward_without_autocast(), *around, *inside], end)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def note_backward(self) -> None:
        """Record that a step will follow."""
        for buffers in self._buffers:
            buffers.note_backward()

    def observe(self, optimizer: Optimizer, result: StepResult) -> None:
        """Restore buffers if the step was skipped."""
        self._window_is_open = False
        for buffers in self._buffers:
            buffers.observe(optimizer, result, manual=False)

    def detach(self) -> None:
        """Restore the modules."""
        for forward in self.forwards:
            forward.detach()


_BEFORE_SETUP = "Call `model.float()` before `fabric.setup`, or load the model in float32"


def _to_fp32(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in HALF_DTYPES:
        return value
    return value if value.dtype is torch.float16 and not value.dim() else value.float()


@final
class _Stage:
    """Says whether a module trains, for its fp8 layers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def in_fp8(self) -> bool:
        return self._module.training


def _by_module(
    modules: Sequence[nn.Module], rules: Sequence[Any], find: Callable[[nn.Module, list[Any]], Any], *, strict: bool
) -> list[list[Any]]:
    """Return for each module the rules that match there. With `strict`, a rule that matches nowhere is an error."""
    shares: list[list[Any]] = [[] for _ in modules]
    for rule in rules:
        errors: list[ValueError] = []
        for module, share in zip(modules, shares, strict=True):
            try:
                find(module, [rule])
            except ValueError as error:
                errors.append(error)
            else:
                share.append(rule)
        if strict and len(errors) == len(modules):
            raise errors[0]
    return shares
