"""The policy: how the loss scale moves after a round of steps. :meth:`DynamicLossScaler.advance` applies it."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import final, override

from lightning_amp._arguments import is_number, require, require_count
from lightning_amp._compat import _torch
from lightning_amp._terminal import own_lines
from lightning_amp._text import called, exact, literal
from lightning_amp.numerics import nonfinite
from lightning_amp.scaling._checkpoint import Saved, check_scaler_state
from lightning_amp.scaling._log import RecordLog, StepResult
from lightning_amp.scaling._scalars import Skip, merge_losses

HALF_LOSS_CEILING = 2.0**15
"""Largest power of two in float16. The gradient that enters a float16 loss *is* the scale, so it must fit."""

_POLICY = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_LIMITS = ("hysteresis", "min_scale", "max_scale", "max_consecutive_skips")


def _remembers_its_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Record in `_explicit` which arguments the caller gave.

    On a resume, they override the checkpoint; defaults do not. A LightningCLI passes all arguments, defaults too.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        by_cli = given.keys() == signature.parameters.keys()
        changed = {name for name, value in given.items() if value != signature.parameters[name].default}
        self._explicit = frozenset(changed if by_cli else given)

    return wrapper


@final
class DynamicLossScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that cannot destroy a model.

    .. code-block:: python

        scaler = DynamicLossScaler(init_scale=2.0**12, hysteresis=2)
        trainer = L.Trainer(plugins=[AmpPrecision("fp16", scaler=scaler)], max_epochs=1)
        trainer.fit(model, data)
        print(scaler.get_scale())

    The scaler multiplies the loss by a scale, so that small float16 gradients do not become zero. When the gradients
    overflow, the step is skipped and the scale falls. After `growth_interval` clean steps in a row it grows. With the
    defaults the sequence of scales equals torch's if every loss is finite and not half precision, and the scale stays
    inside the limits. It adds to torch's scaler:

    * The scale has limits. Torch's scale can fall to 0, and the next healthy batch is then multiplied by an infinite
      inverse.
    * A non-finite *loss* leaves the scale alone. Scaling acts on gradients, so lowering the scale cannot help.
    * Hysteresis after Megatron-LM: the scale falls only after several overflows.
    * An end: `max_consecutive_skips` skipped steps in a row raise an error with the reasons.

    It works wherever a `GradScaler` does, in a plain torch loop too. In a Trainer, pass it to
    :class:`~lightning_amp.AmpPrecision`, which decides whether to skip steps, while this class decides the scale.
    During the run `scale` and `unscale_` do what the plugin does; `step` and `update` raise and name the plugin's call.

    Args:
        init_scale: The first scale. The default is the default of torch.
        growth_factor: Factor by which the scale grows after `growth_interval` clean steps in a row; above 1.
        backoff_factor: Factor by which the scale falls after an overflow; between 0 and 1.
        growth_interval: Number of clean steps in a row before the scale grows.
        hysteresis: Number of overflows before the scale falls. Only growth resets the count (Megatron-LM,
            `megatron/core/optimizer/grad_scaler.py`). 1 is torch's behaviour, 2 is Megatron's default.
        min_scale: The scale never falls below it. At the default, `2**-14`, a scaled gradient is *smaller* than
            the true one by the range of normal float16 numbers. A run whose scale falls that far has another problem.
        max_scale: The scale never grows above it. The default is Apex's `2**24`. A float16 loss lowers it to `2**15`.
        max_consecutive_skips: Raise :class:`FloatingPointError` after this many consecutive skips. A skip that lowers
            the scale starts the count again.
        device: Device type (`"cuda"`, `"cpu"`, ...). `None` takes the device of the first loss. In a Trainer the
            plugin sets it.
        enabled: `False` makes every method a no-op, as in torch.

    Raises:
        ValueError: If an argument is out of its range.
        RuntimeError: For `step` or `update` by hand while a plugin or `ScaledSteps` owns the steps.

    Cost: `get_scale`, `state_dict`, pickling, `step` of an optimizer that is not fused, and one in
    `max_consecutive_skips` calls of `update` wait for the device.

    """

    _explicit: frozenset[str] = frozenset()

    @_remembers_its_arguments
    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        max_consecutive_skips: int = 64,
        device: str | torch.device | None = None,
        enabled: bool = True,
    ) -> None:
        require_count("growth_interval", growth_interval)
        require_count("hysteresis", hysteresis)
        require_count("max_consecutive_skips", max_consecutive_skips)
        fine = is_number(growth_factor) and growth_factor > 1
        require(fine, "growth_factor", "a number above 1", growth_factor)
        fine = is_number(backoff_factor) and 0 < backoff_factor < 1
        require(fine, "backoff_factor", "a number above 0 and below 1", backoff_factor)
        require(is_number(min_scale) and min_scale > 0, "min_scale", "a number above 0", min_scale)
        fine = is_number(max_scale) and max_scale <= torch.finfo(torch.float32).max
        require(fine, "max_scale", "a number that float32 can hold", max_scale)
        fine = is_number(init_scale) and min_scale <= init_scale <= max_scale
        rule = f"a number from `min_scale`, {literal(min_scale)}, to `max_scale`, {literal(max_scale)}"
        require(fine, "init_scale", rule, init_scale, "Move the limit, or start inside.")
        device_type = "cpu" if device is None else torch.device(device).type
        numbers = float(init_scale), float(growth_factor), float(backoff_factor)
        super().__init__(device_type, *numbers, growth_interval, enabled)
        self.hysteresis = hysteresis
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self.max_consecutive_skips = max_consecutive_skips
        self._start = (float(init_scale), self.min_scale, self.max_scale)
        self._owner_ref: weakref.ref[Any] | None = None
        self._forget_steps(hysteresis)

    def _forget_steps(self, allowance: int) -> None:
        """Begin anew; `allowance` overflows are left before the scale falls."""
        self._allowance: Tensor | int = allowance  # a tensor once the scale is on a device
        self._loss: Tensor | None = None  # finite exactly if all losses since the last update were
        self._log = self._new_log()  # only for loops without the plugin

    def _new_log(self) -> RecordLog:
        return RecordLog(self.max_consecutive_skips, block=self.max_consecutive_skips)

    @classmethod
    def static(cls, scale: float) -> DynamicLossScaler:
        """Return a scaler with a constant scale, a finite number above 0. Non-finite steps are still skipped.

        Only a float16 loss changes the scale, to 2**15 if it is larger: see :meth:`multiply`.
        """
        fine = is_number(scale) and scale > 0
        require(fine, "scaler", "a finite number above 0", scale, "A usual static scale is 2.0**10.")
        return cls(scale, min_scale=scale, max_scale=scale)

    @classmethod
    def taking(cls, scaler: torch.amp.GradScaler | float | None) -> DynamicLossScaler | None:
        """Return this scaler itself, a static one for a number, or one with the settings of torch's `GradScaler`.

        Raises:
            ValueError: For anything else, and for a class with an `update` of its own, whose policy would not be used.

        """
        if scaler is None:
            return None
        if isinstance(scaler, (int, float)):
            return cls.static(scaler)
        if isinstance(scaler, DynamicLossScaler):
            return scaler
        legal = "a `lightning_amp.DynamicLossScaler`, a `torch.amp.GradScaler`, a float for a static scale"
        advice = f"Write `{scaler.__name__}()`." if isinstance(scaler, type) else ""
        require(isinstance(scaler, torch.amp.GradScaler), "scaler", legal, scaler, advice, none="or `None`")
        kind = type(scaler)
        if kind.update is not torch.amp.GradScaler.update and not kind.__module__.startswith("torch."):
            raise ValueError(
                f"`scaler` must not be a `{kind.__name__}`, whose own `update` would not be called: the policy is that"
                " of `DynamicLossScaler`. Pass `DynamicLossScaler(init_scale=..., growth_interval=...)`."
            )
        if not scaler.is_enabled():
            return cls(enabled=False)
        scale, defaults = scaler.get_scale(), _POLICY | {"min_scale": 2.0**-14, "max_scale": 2.0**24}
        settings: dict[str, Any] = {name: getattr(scaler, f"get_{name}")() for name in _POLICY}
        settings |= {"min_scale": min(scale, 2.0**-14), "max_scale": max(scale, 2.0**24)}
        return cls(scale, **{name: value for name, value in settings.items() if value != defaults[name]})

    def serve(self, owner: Any) -> None:
        """Pass `scale` and `unscale_` on to the steps of a run, until it is over or this is called with `None`."""
        self._owner_ref = None if owner is None else weakref.ref(owner)

    @property
    def _owner(self) -> Any:
        return None if self._owner_ref is None else self._owner_ref()

    @override
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss of any shape, or nested iterables of losses, by the scale."""
        if self.is_enabled() and isinstance(outputs, Iterable) and not isinstance(outputs, Tensor):
            scaled = [self.scale(output) for output in outputs]
            return tuple(scaled) if isinstance(outputs, tuple) else scaled
        return self.multiply(outputs) if self._owner is None else self._owner.scale_by_hand(outputs)

    def multiply(self, loss: Any) -> Any:
        """Multiply a loss by the scale.

        The first float16 loss lowers `max_scale` to 2**15, with one warning. The gradient that enters a float16 tensor
        is the scale itself, and float16 ends at 65504.
        """
        if self.is_enabled() and isinstance(loss, Tensor):
            _torch.scale_tensor(self, loss.device)
            if loss.dtype == torch.float16 and self.max_scale > HALF_LOSS_CEILING:
                self._lower_ceiling()
            if self._owner is None:  # otherwise the steps of a run keep their losses
                self._loss = merge_losses(self._loss, loss)
        return super().scale(loss)

    def _lower_ceiling(self) -> None:
        self.max_scale = HALF_LOSS_CEILING
        self.min_scale = min(self.min_scale, HALF_LOSS_CEILING)
        _torch.set_scale_tensor(self, self.scale_tensor.clamp(max=HALF_LOSS_CEILING))
        with own_lines():
            warnings.warn(
                "The loss is float16. Its gradient is the loss scale itself, and float16 ends at 65504, so every step"
                f" at a scale of 2**16 or more would be lost: `max_scale` is now {exact(HALF_LOSS_CEILING)}. A float32"
                " loss from the first step on (for example `loss.float()` before the mean) needs no such limit.",
                stacklevel=4,
            )

    @override
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of `optimizer`; see `torch.amp.GradScaler.unscale_`."""
        if self._owner is None:
            super().unscale_(optimizer)
        else:
            self._owner.unscale_(optimizer)

    @override
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step unless the gradients overflowed; see `torch.amp.GradScaler.step`."""
        self._refuse("step")
        return super().step(optimizer, *args, **kwargs)

    def _refuse(self, method: str) -> None:
        if self._owner is not None:
            raise RuntimeError(
                f"`scaler.{method}` was called in a run that steps, skips and moves the scale itself. Call"
                f" {self._owner.calls.step}, and leave out `scaler.step` and `scaler.update`."
            )

    @property
    def scale_tensor(self) -> Tensor:
        """Return the scale on its device, shape []. A later update does not change this tensor."""
        return _torch.scale_tensor(self)

    # -- the policy ----------------------------------------------------------------------------------------------------

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale after the steps of one batch; see `torch.amp.GradScaler.update`.

        Args:
            new_scale: Set the scale to this value instead, clamped to the limits.

        Raises:
            FloatingPointError: After `max_consecutive_skips` skipped steps in a row (at most one read-back later).

        """
        if not self.is_enabled():
            return
        self._refuse("update")
        if new_scale is not None:
            value = torch.as_tensor(new_scale, dtype=torch.float32, device=self.scale_tensor.device).detach()
            _torch.set_scale_tensor(self, value.reshape(()).clamp(self.min_scale, self.max_scale))
            _torch.take_found_infs(self)
            return
        found_infs = _torch.take_found_infs(self)
        if not found_infs:
            raise AssertionError("No inf checks were recorded prior to update.")  # torch's own message and type
        used = self.scale_tensor
        found_inf = torch.stack([found.to(used.device) for found in found_infs]).amax()
        loss = self._loss
        self.advance(found_inf, None if loss is None else nonfinite(loss).to(used.device).logical_and(found_inf))
        self._log.append(StepResult(Skip.on_device(found_inf), loss, scale=used))
        self._log.close_round(self.scale_tensor)

    def advance(self, found_inf: Tensor, held: Tensor | None = None) -> None:
        """Apply the policy once, on the device.

        Args:
            found_inf: Float tensor [], 1.0 if gradients of this batch overflowed.
            held: Bool or float tensor [], true if scale, growth tracker and allowance must stay as they are, since
                the loss itself was not finite.

        """
        self._loss = None
        scale, tracker = self.scale_tensor, _torch.growth_tracker(self)
        new_scale, new_tracker = scale.clone(), tracker if held is None else tracker.clone()
        _torch.amp_update_scale(self, new_scale, new_tracker, found_inf)
        if self.hysteresis > 1:
            overflow = found_inf > 0
            allowance = torch.as_tensor(self._allowance, dtype=torch.int32, device=scale.device)
            new_allowance = allowance - overflow.to(torch.int32)
            new_scale = torch.where(overflow & (new_allowance > 0), scale, new_scale)
            grew = ~overflow & (new_tracker == 0)
            new_allowance = torch.where(grew, self.hysteresis, new_allowance)
            if held is not None:
                new_allowance = torch.where(held > 0, allowance, new_allowance)
            self._allowance = new_allowance
        new_scale.clamp_(self.min_scale, self.max_scale)
        if held is not None:
            new_scale = torch.where(held > 0, scale, new_scale)
            new_tracker = torch.where(held > 0, tracker, new_tracker)
        _torch.set_scale_tensor(self, new_scale, new_tracker)

    # -- state ---------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Return to the first scale and the original limits, and forget all records."""
        init_scale, self.min_scale, self.max_scale = self._start
        _torch.reset_scale(self, init_scale)
        self._forget_steps(self.hysteresis)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and our own, which a stock `GradScaler` ignores. This waits for the device."""
        state = super().state_dict()
        if state:
            state |= {name: getattr(self, name) for name in _LIMITS}
            state["_hysteresis_tracker"] = int(self._allowance)
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of a stock `GradScaler`.

        The scale continues from the state. All other arguments that the user passed to the constructor override the
        state; :meth:`overridden` returns these differences.

        Raises:
            RuntimeError: If the state comes from a disabled scaler, as in torch.
            ValueError: If an entry is missing or wrong, such as a scale of 0 or NaN.

        """
        if not self.is_enabled():
            return
        if state_dict:
            check_scaler_state(state_dict, "scaler")
        keep = self.overridden(state_dict)
        super().load_state_dict({**state_dict, **{k: v for k, (v, _) in keep.items() if k in _POLICY}})
        for name in _LIMITS:
            if name in state_dict and name not in self._explicit:
                setattr(self, name, state_dict[name])
        scale = min(max(float(state_dict["scale"]), self.min_scale), self.max_scale)
        _torch.reset_scale(self, scale, state_dict[_torch.GROWTH_TRACKER])
        self._forget_steps(min(int(state_dict.get("_hysteresis_tracker", self.hysteresis)), self.hysteresis))

    def overridden(self, state_dict: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the arguments that differ from `state_dict`: name -> (the user's value, the state's value)."""
        return {
            name: (value, state_dict[name])
            for name, value in self._settings().items()
            if name in self._explicit and name in state_dict and state_dict[name] != value
        }

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, f"get_{name}")() for name in _POLICY} | {n: getattr(self, n) for n in _LIMITS}

    def __getstate__(self) -> dict[str, Any]:
        steps = {"_allowance": int(self._allowance), "_loss": None, "_log": self._new_log(), "_owner_ref": None}
        return super().__getstate__() | steps

    def __repr__(self) -> str:
        """Return the code that makes this scaler, without arguments that have their default."""
        own = {"init_scale": self._start[0], **self._settings()} if self.is_enabled() else {"enabled": False}
        return called(self, **own)


def load_state(saved: Saved, scaler: DynamicLossScaler | None, log: RecordLog) -> list[str]:
    """Continue from a state of this package, or from a bare `GradScaler` state.

    Return a sentence for each setting of the scaler that stays as the user passed it. If an entry is missing or wrong,
    it changes nothing and raises a `ValueError`.
    """
    ours = "num_steps" in saved or "scaler" in saved
    state: Any = saved.any("scaler") if ours else saved.values
    if scaler is not None and state:
        check_scaler_state(state, f"{saved.name}.scaler" if ours else saved.name)
    if ours:
        log.load(saved)
    if scaler is None or not state:
        return []
    passed = scaler.overridden(state)
    scaler.load_state_dict(state)
    return [
        f"lightning_amp: `{setting}={literal(mine)}`, as passed, is used; the checkpoint had {literal(theirs)}."
        for setting, (mine, theirs) in passed.items()
    ]
