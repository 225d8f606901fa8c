"""`FabricAmpPrecision`: the optimizer step of `AmpPrecision` for Lightning Fabric.

This file translates the hooks of Fabric, and restores buffers after a skipped step. `_forward.py` makes the contexts of
forwards; `ScaledSteps` runs backwards and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import final, override

from lightning_amp import _messages
from lightning_amp._compat import _modules, _names
from lightning_amp._compat._names import FabricPrecision as Precision
from lightning_amp._containers import replace
from lightning_amp.casting import modules_matching
from lightning_amp.numerics import HALF_DTYPES
from lightning_amp.precision import _error_notes, _refusals
from lightning_amp.precision._first_line import first_line, resumed
from lightning_amp.precision._forward import Context, ForwardContexts, Together, autocast
from lightning_amp.precision._fp8 import Fp8
from lightning_amp.precision._settings import PluginArguments
from lightning_amp.scaling import Calls, ScaledSteps, parameters
from lightning_amp.skipped_steps import KeptBuffers, matching_places, norm_places

_IN_FABRIC = Calls(
    "Fabric",
    "fabric.backward(loss)",
    "`step()` of the optimizer that `fabric.setup` has returned",
    "Pass the optimizer to `fabric.setup(model, optimizer)`, or to `fabric.setup_optimizers`, and call `step()` of what"
    " it returns",
)
_BEFORE_SETUP = "Call `model.float()` before `fabric.setup`, or load the model in float32"


@final
class FabricAmpPrecision(PluginArguments, ScaledSteps, Precision):  # type: ignore[misc]
    r"""Precision plugin for Fabric: autocast and loss scaling that change rounding, speed and memory, and nothing else.

    .. code-block:: python

        amp = FabricAmpPrecision("fp16")
        fabric = L.Fabric(accelerator="cpu", plugins=[amp])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        model, optimizer = fabric.setup(model, optimizer)
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            fabric.backward(model(batch).square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            amp.on_applied(scheduler.step)

    Save it with the model: `fabric.save(path, {"model": model, "optimizer": optimizer, "amp": amp})`.

    It runs the step of :class:`AmpPrecision`. Fused optimizers can be clipped, and closures and accumulation work. All
    optimizers share one loss scale, which moves once per round: when all optimizers have stepped, or one of them steps
    again. All ranks skip together. A skipped step also restores the statistics of normalisation layers. A clip of
    gradients that are not finite changes nothing and returns 0, and the step is skipped.

    Inputs of the model are not rounded: only autocast rounds, inside. Outputs are float32. Code outside of the model,
    such as the loss, runs in fp32, or under `with fabric.autocast():`.

    The settings take effect at the first forward of a module that was set up. Until then the device is not known.

    Args:
        precision: See :class:`AmpPrecision`, also for the other arguments.
        scaler: `None`, a `DynamicLossScaler`, a `torch.amp.GradScaler`, whose settings are taken, or a float.
        fp32_modules: Rules on the modules that were set up, each with names of its own.
        skip_nonfinite: Skip steps with non-finite gradients in bf16 and fp32 too.
        restore_buffers: Rules for buffers that a skipped step restores.
        fp8_recipe: For `"fp8"` only.
        process_group: The ranks that train and skip together, if only some do; the `process_group` of the strategy.

    Raises:
        ValueError: For a wrong argument. At the first forward, for a precision that the device cannot run, a rule that
            matches nothing, or trainable parameters in half precision.
        RuntimeError: For a backward or step that bypasses Fabric while there is a loss scale.
        FloatingPointError: During training, after 64 skips in a row.

    Cost: a fused optimizer does not wait for the device, and `fabric.clip_gradients` does.
    """

    calls = _IN_FABRIC

    def __init__(
        self,
        precision: str | int | torch.dtype = "auto",
        *,
        scaler: torch.amp.GradScaler | float | None = None,
        fp32_modules: Sequence[type[nn.Module] | str] = (),
        skip_nonfinite: bool = True,
        restore_buffers: Sequence[str] = (),
        fp8_recipe: Any = None,
        process_group: Any = None,
    ) -> None:
        self._take(precision, None, scaler, fp32_modules, skip_nonfinite, restore_buffers, fp8_recipe)
        self.process_group = process_group
        self._kept = ["_kept", *vars(self)]  # the attributes that a copy or a pickle has
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._choice, scaler = self._until_attached()
        self._new: list[nn.Module] = []  # were set up since the last forward
        self._forwards: list[ForwardContexts] = []  # of the modules before
        self._fp8_layers: dict[str, str | None] = {}
        self._loaded: dict[str, Any] | None = None  # a checkpoint for "auto", from before the first forward
        self._why: str | None = None  # the reason of "auto" until the first line is logged
        forwards = self._forwards  # not the plugin, so that it is gone with its last reference
        self.begin(scaler, (), lambda: _refusals.describe_nonfinite_gradients(*(f.module for f in forwards)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the scaler for a pickle or a deep copy, without the modules and steps."""
        return {name: vars(self)[name] for name in self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_afresh()

    def __str__(self) -> str:
        """Return the plugin as the Trainer shows it, which says that it has an invalid type."""
        _names.require_kind_of_caller(self)
        other = _refusals.as_written("AmpPrecision", self)
        return f"{self!r} (it is for `L.Fabric`; for a Trainer use `lightning_amp.{other}`)"

    @override
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of `optimizer`, to read or change them before the step."""
        self._get_ready()
        super().unscale_(optimizer)

    # -- modules -------------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._new.append(module)
        return module

    def _get_ready(self) -> None:
        """Let the settings take effect on modules that were set up since, on the device of the first one."""
        modules = self._new  # kept if an error follows, so that the next forward raises it again
        if self._root_device is None and not modules:
            raise RuntimeError(f"`{self!r}` has no module yet: call `model, optimizer = fabric.setup(...)` first.")
        if self._root_device is None:
            tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
            device = next((t.device for t in tensors), torch.device(self.device))
            choice, _, self._why = self._choose(device, self.process_group)
            self.device, self._choice = device.type, choice
            self.go_on_in(choice.name, self._scaler_for(choice, device.type))
            if self._loaded is not None:
                self._load_and_say(self._loaded)
            self._root_device = device
        if not modules:
            return
        is_first, choice, device = not self._forwards, self._settled(), self._root_device
        rules = _by_module(modules, self.fp32_modules, modules_matching, strict=is_first)
        named = _by_module(modules, self.restore_buffers, matching_places, strict=is_first)
        for module in modules if choice.mixed else ():
            _refusals.refuse_half_parameters(module, choice, lambda _: _BEFORE_SETUP)
        forward = partial(autocast, choice, device.type)
        pairs = zip(modules, rules, strict=True)
        added = [ForwardContexts(m, device.type, choice, choice, its_rules, forward) for m, its_rules in pairs]
        summaries: list[str] = []
        if self.fp8_recipe is not None:
            fp8 = Fp8(added, self.fp8_recipe, device, is_first=is_first)
            self._fp8_layers |= fp8.layers
            summaries = fp8.summaries
        for module, its_rules in zip(modules, named, strict=True) if self._skips else ():
            both = (norm_places(module), True), (matching_places(module, its_rules), False)
            self._buffers += [KeptBuffers(module, found, counted=counted) for found, counted in both if found]
        self._forwards += added
        self._new = []
        self.started().expect(p for m in modules for p in m.parameters())
        if self._why is None:
            _messages.info(*(f"lightning_amp: {summary}." for summary in summaries))
        else:
            _messages.info(first_line(self, self._forwards, self._why, summaries))
            self._why = None

    # -- forward -------------------------------------------------------------------------------------------------------

    @override
    def convert_input(self, data: Any) -> Any:
        self._get_ready()
        # a step begins with the first forward in training mode, which may be a teacher's, without gradients
        if any(forward.module.training for forward in self._forwards):
            for buffers in self._buffers:
                if not buffers.window_is_open:
                    buffers.enter_step()
        return data

    @override
    def forward_context(self) -> Context:
        if self._forwards or self._new:  # otherwise it is `fabric.autocast()` alone
            self._get_ready()
            return self._together("the forward", autocast(self._settled(), self.device))
        return autocast(self._settled(), self.device)

    @override
    def convert_output(self, data: Any) -> Any:
        """Return the outputs in float32, except a float16 loss, at which the loss scale must not exceed 65504."""
        self._get_ready()
        return replace(data, _to_fp32) if self._settled().mixed else data

    def _together(self, name: str, *inside: Context) -> Together:
        for forward in self._forwards:
            forward.evaluating = not forward.module.training
        around = [context for forward in self._forwards for context in forward.around(in_backward=not inside)]
        modules = [forward.module for forward in self._forwards]
        end = partial(_error_notes.note, choice=self._settled(), modules=modules, step=name)
        return Together([_modules.compiled_backward_without_autocast(), *around, *inside], end)

    # -- backward and step ---------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._get_ready()
        with self._together("the backward"):
            super().backward(tensor, *args, **kwargs)

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self.unscale_(optimizer)

    @override
    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Return the parameters to clip: if the step will be skipped only a zero, so that Fabric raises no error."""
        if not self.started().will_skip(optimizer):
            return parameters(optimizer)
        nothing = nn.Parameter(torch.zeros(1))
        nothing.grad = torch.zeros(1)
        return iter((nothing,))

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._get_ready()
        return self.step(optimizer, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None and self._root_device is None:
            return dict(self._loaded)
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._choice is None:
            self.load(state_dict, type(self).__name__)  # refuses a wrong one
            self._loaded = state_dict  # "auto" chooses the precision at the first forward, and loads it again
        else:
            self._load_and_say(state_dict)

    def _load_and_say(self, state_dict: dict[str, Any]) -> None:
        _messages.info(*self.load(state_dict, type(self).__name__))
        _messages.info(*resumed(state_dict, self._settled().name, self.scaler))

    @override
    def teardown(self) -> None:
        for forward in self._forwards:
            forward.detach()


def _to_fp32(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in HALF_DTYPES:
        return value
    return value if value.dtype is torch.float16 and not value.dim() else value.float()


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
                share.append(rule)
            except ValueError as error:
                errors.append(error)
        if strict and len(errors) == len(modules):
            raise errors[0]
    return shares
