"""`FabricAmpPrecision`: the optimizer step of `AmpPrecision` for Lightning Fabric.

This file translates the hooks of Fabric. `_fabric_modules.py` holds what happens around forwards; `ScaledSteps` runs
backwards and steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import final, override

from lightning_amp._arguments import require_bool
from lightning_amp.casting import Canonical, Choice, checked_module_rules
from lightning_amp.precision import _refusals
from lightning_amp.precision._fabric_modules import FabricModules, device_of
from lightning_amp.precision._first_line import first_line, resumed, say
from lightning_amp.precision._forward import autocast
from lightning_amp.precision._settings import Settings
from lightning_amp.scaling import Calls, ScaledSteps, parameters
from lightning_amp.skipped_steps import checked_buffer_rules

_IN_FABRIC = Calls(
    "Fabric",
    "fabric.backward(loss)",
    "`step()` of the optimizer that `fabric.setup` has returned",
    "Pass the optimizer to `fabric.setup(model, optimizer)`, or to `fabric.setup_optimizers`, and call `step()` of what"
    " it returns",
)


_KEPT = ("_settings", "fp8_recipe", "fp32_modules", "skip_nonfinite", "restore_buffers", "process_group", "device")
"""The attributes that a copy or a pickle has."""


@final
class FabricAmpPrecision(ScaledSteps, Precision):
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
        self._settings = Settings(precision, None, scaler, fp8_recipe)
        self.fp8_recipe = self._settings.fp8_recipe
        self.fp32_modules = checked_module_rules(fp32_modules)
        require_bool("skip_nonfinite", skip_nonfinite)
        self.skip_nonfinite = skip_nonfinite
        self.restore_buffers = checked_buffer_rules(restore_buffers)
        self.process_group = process_group
        self.device = (torch.accelerator.current_accelerator(True) or torch.device("cpu")).type  # until the first step
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._choice, scaler = self._settings.first()
        self._new: list[nn.Module] = []  # were set up since the last forward
        self._set_up: FabricModules | None = None
        self._loaded: dict[str, Any] | None = None  # a checkpoint for "auto", from before the first forward
        self._why: str | None = None  # the reason of "auto" until the first line is logged
        plugin = weakref.ref(self)

        def describe() -> str:
            modules = None if (this := plugin()) is None else this._set_up
            return "" if modules is None else _refusals.describe_nonfinite_gradients(*modules.modules)

        self.begin(scaler, (), _IN_FABRIC, describe)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the scaler for a pickle or a deep copy, without the modules and steps."""
        return {name: vars(self)[name] for name in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_afresh()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.requested!r})"

    def __str__(self) -> str:
        """Return the plugin as the Trainer shows it, which says that it has an invalid type."""
        other = _refusals.as_written("AmpPrecision", self)
        return f"{self!r} (it is for `L.Fabric`; for a Trainer use `lightning_amp.{other}`)"

    # -- what was done so far ------------------------------------------------------------------------------------------

    @property
    @override
    def precision(self) -> Canonical:  # type: ignore[override]
        """Return Lightning's name, `"16-mixed"`, `"bf16-mixed"` (for `"fp8"` too) or `"32-true"`."""
        return self._settled().canonical

    def _settled(self) -> Choice:
        return self._choice or Choice.pick(torch.device(self.device))[0]

    @property
    def fp8_layers(self) -> Mapping[str, str | None]:
        """Map the name of each `nn.Linear` to `None` if it runs in fp8, else to the reason."""
        return {} if self._set_up is None else dict(self._set_up.fp8_layers)

    @override
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of `optimizer`, to read or change them before the step."""
        self._ready()
        super().unscale_(optimizer)

    # -- forward -------------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._new.append(module)
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        self._ready().begin_forward()
        return data

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if self._set_up is None and not self._new:  # `fabric.autocast()` alone
            return autocast(self._settled(), self.device)
        return self._ready().forward()

    @override
    def convert_output(self, data: Any) -> Any:
        return self._ready().end_forward(data)

    def _ready(self) -> FabricModules:
        """Return the modules, after the settings took effect on those that were set up since."""
        modules = self._set_up
        if modules is None or self._new:
            if modules is None and not self._new:
                raise RuntimeError(f"`{self!r}` has no module yet: call `model, optimizer = fabric.setup(...)` first.")
            modules = self._set_up = modules or self._settle(device_of(self._new, self.device))
            fp8 = modules.add(self._new)
            self.started().expect(p for m in self._new for p in m.parameters())
            self._new = []
            if self._why is None:
                say(f"lightning_amp: {summary}." for summary in fp8)
            else:
                given, forwards = self._settings.given_scaler, modules.forwards
                say([first_line(forwards, self._why, self.scaler, given, modules.skips, fp8=fp8)])
                self._why = None
        return modules

    def _settle(self, device: torch.device) -> FabricModules:
        """Let the settings take effect on this device."""
        self.device = device.type
        choice, _, self._why = self._settings.choose(device, self.process_group)
        scaler = self._settings.scaler(choice, device.type)
        skips = self.skip_nonfinite or (scaler is not None and scaler.is_enabled())
        rules = self.fp32_modules, self.restore_buffers
        modules = FabricModules(choice, device, *rules, self.fp8_recipe, skips=skips)
        self._choice, self._observer, self._reduces_on = choice, modules, device
        self.go_on_in(choice.name, scaler)
        if self._loaded is not None:
            self._load_and_say(self._loaded)
        return modules

    # -- backward and step ---------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with self._ready().backward():
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
        self._ready()
        return self.step(optimizer, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None and self._set_up is None:
            return dict(self._loaded)
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._set_up is None and self._choice is None:
            self.load(state_dict, type(self).__name__)  # refuses a wrong one
            self._loaded = state_dict  # "auto" chooses the precision at the first forward, and loads it again
        else:
            self._load_and_say(state_dict)

    def _load_and_say(self, state_dict: dict[str, Any]) -> None:
        say(self.load(state_dict, type(self).__name__))
        say(resumed(state_dict, self._settled().name, self.scaler))

    @override
    def teardown(self) -> None:
        if self._set_up is not None:
            self._set_up.detach()
