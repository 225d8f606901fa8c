"""Run the forwards of modules that Fabric has set up: autocast, fp32 modules, fp8, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import final

from lightning_amp._compat import _modules, _sharding, _torch
from lightning_amp._containers import replace, to_fp32
from lightning_amp.casting import (
    Choice,
    Fp32Modules,
    Overrides,
    ReusedWeights,
    Rule,
    choose_fp8_layers,
    fp8_summary,
    linears_in_fp8,
    may_run_in_fp8,
    modules_matching,
    nothing_qualifies,
)
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import _fp8, _upcast_parameters
from lightning_amp.scaling import StepResult
from lightning_amp.skipped_steps import KeptBuffers, matching_places, norm_places


def device_of(modules: Iterable[nn.Module], default: str) -> torch.device:
    """Return the device of the first parameter or buffer."""
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    return next((t.device for t in tensors), torch.device(default))


def autocast(choice: Choice, device_type: str) -> torch.autocast:
    """Return the context of a forward in this precision."""
    if not choice.mixed:
        return torch.autocast(device_type, enabled=False)
    # torch's cache would sum the gradients of all uses of a weight in half precision
    return torch.autocast(device_type, dtype=choice.dtype, cache_enabled=False)


@final
class FabricModules:
    """All modules that Fabric has set up, in one precision.

    Attributes:
        modules: The user's modules, inside of Fabric's wrappers.
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
        self.modules: list[nn.Module] = []
        self.device, self.skips = device, skips
        self.fp8_layers: dict[str, str | None] = {}
        self._news_of_fp8: list[str] = []
        self._choice = choice
        self._rules, self._buffer_rules, self._fp8_recipe = fp32_modules, restore_buffers, fp8_recipe
        self._fp32: list[Fp32Modules] = []
        self._fp8: list[Overrides] = []
        self._reused: list[ReusedWeights] = []
        self._buffers: list[KeptBuffers] = []
        self._window_is_open = False
        self._is_float64 = self._looked = False
        self._compiling = _modules.CompiledBackwardWithoutAutocast()

    def add(self, modules: Sequence[nn.Module]) -> None:
        """Apply the settings to modules that were set up. If one is refused, none is changed."""
        first = not self.modules
        rules = _by_module(modules, self._rules, modules_matching, strict=first)
        buffers = _by_module(modules, self._buffer_rules, matching_places, strict=first)
        for module in modules if self.skips else ():
            if lazy := next((name for name, buffer in module.named_buffers() if is_lazy(buffer)), None):
                raise ValueError(
                    f"A skipped step cannot restore the buffer `{lazy}` of a lazy module, which has no shape yet: call"
                    " `model(batch)` once before `fabric.setup`."
                )
        for module in modules if self._choice.mixed else ():
            if half := _upcast_parameters.trained_in_half(module):
                name, dtype = next(iter(half.items()))
                raise ValueError(
                    f"precision {self._choice.name!r} cannot train this module: `{name}` is {dtype}. Mixed precision"
                    " keeps float32 parameters; in half precision most small updates are rounded away. Call"
                    " `model.float()` before `fabric.setup`, or load the model in float32."
                )
        fp8 = self._choose_fp8(modules, rules) if self._fp8_recipe is not None else []
        for module, its_rules, its_buffers in zip(modules, rules, buffers, strict=True):
            self._fp32.append(Fp32Modules(module, its_rules, self.device.type, active=self._choice.mixed))
            if self._choice.mixed:
                self._reused.append(ReusedWeights(module, self.device.type))
            if self.skips:
                kept = KeptBuffers(norm_places(module), counted=True)
                named = KeptBuffers(matching_places(module, its_buffers), counted=False)
                self._buffers += filter(None, (kept, named))
        self._fp8 += fp8
        self.modules += modules
        self._is_float64 = any(p.dtype == torch.float64 for m in self.modules for p in m.parameters())

    def _choose_fp8(self, modules: Sequence[nn.Module], rules: Sequence[Sequence[Rule]]) -> list[Overrides]:
        chosen: list[Overrides] = []
        layers: dict[str, str | None] = {}
        summaries: list[str] = []
        for module, its_rules in zip(modules, rules, strict=True):
            matching = modules_matching(module, its_rules).values()
            in_fp32 = {inner for outer in matching for inner in outer.modules()}
            found = choose_fp8_layers(module, in_fp32, self._fp8_recipe, self.device)
            layers.update(found)
            summaries += filter(None, [fp8_summary(module, found, self._fp8_recipe)])
            names = may_run_in_fp8(found)
            if names:
                stage = _Stage(module)
                chosen.append(linears_in_fp8(module, names, self._fp8_recipe, self.device.type, stage))
        if not summaries and not self.fp8_layers:
            raise ValueError(f"{nothing_qualifies(modules[0], layers)}\nUse precision 'bf16'.")
        if not self.fp8_layers:
            _fp8.warn_about(self._fp8_recipe)
        self.fp8_layers.update(layers)
        self._news_of_fp8 += summaries
        return chosen

    def news_of_fp8(self) -> list[str]:
        """Return a summary for each module in fp8 that was added since the last call."""
        news, self._news_of_fp8 = self._news_of_fp8, []
        return news

    # -- forward and backward ------------------------------------------------------------------------------------------

    def begin_forward(self, data: Any) -> Any:
        """Copy buffers if a step begins, and return the inputs, with float64 values as float32.

        A step begins with the first forward in training mode, which may be a teacher's, without gradients.
        """
        if self._buffers and not self._window_is_open and any(module.training for module in self.modules):
            self._window_is_open = True
            for buffers in self._buffers:
                buffers.enter_step()
        return to_fp32(data, (torch.float64,)) if self._choice.mixed and not self._is_float64 else data

    def forward(self) -> _Together:
        """Return the context of a forward in the precision of the plugin."""
        return _Together([self._compiling, *self._fp8, *self._reused, autocast(self._choice, self.device.type)])

    def end_forward(self, data: Any) -> Any:
        """Return the outputs in float32, except a float16 loss, at which the loss scale must not exceed 65504."""
        return replace(data, _to_fp32) if self._choice.mixed else data

    def backward(self) -> _Together:
        """Return the context of a backward, in which activation checkpointing runs forwards again."""
        return _Together([self._compiling, *self._fp8])

    def leaves(self, loss: Tensor) -> list[Any]:
        """Return the leaves below the first loss, which may belong to modules that were not set up; then nothing.

        Sharded modules gather their parameters for the forward, so that the leaves are not those of the optimizer.
        """
        if self._looked or any(_sharding.is_sharded_module(module) for module in self.modules):
            return []
        self._looked = True
        return _torch.leaves(loss)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def note_backward(self) -> None:
        """Record that a step will follow."""
        for buffers in self._buffers:
            buffers.note_backward()

    def observe(self, result: StepResult) -> None:
        """Restore buffers if the step was skipped."""
        self._window_is_open = False
        for buffers in self._buffers:
            buffers.observe(result, inside_step=False)

    def detach(self) -> None:
        """Restore the modules."""
        for each in self._fp32:
            each.remove()


def _to_fp32(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in HALF_DTYPES:
        return value
    return value if value.dtype is torch.float16 and not value.dim() else value.float()


@final
class _Together:
    """Several contexts as one, in a tenth of the time of an `ExitStack`."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


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
