"""Dynamic loss scaling with limits and hysteresis, on torch's own `GradScaler`."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import final, override

from lightning_amp._arguments import is_number, require, require_count
from lightning_amp._compat import _torch
from lightning_amp._terminal import own_lines
from lightning_amp._text import exact, literal
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._saved import check_scaler_state
from lightning_amp.scaling._step_result import Skip, StepResult, held_by, merge_losses

HALF_LOSS_CEILING = 2.0**15
"""Largest power of two that float16 can hold: the gradient that enters a float16 loss *is* the scale."""

_POLICY = ("growth_factor", "backoff_factor", "growth_interval")
_LIMITS = ("hysteresis", "min_scale", "max_scale", "max_consecutive_skips")
POLICY_SETTINGS = ("init_scale", *_POLICY, *_LIMITS)
"""What decides about the scale: the arguments of :class:`DynamicLossScaler` without `device` and `enabled`."""


def _remembers_its_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Note in `_explicit` what the caller wrote down: on a resume this wins over the checkpoint, defaults do not."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._explicit = frozenset(signature.bind(self, *args, **kwargs).arguments) - {"self"}

    return wrapper


@final
class DynamicLossScaler(torch.amp.GradScaler):
    r"""A `torch.amp.GradScaler` that cannot destroy a model.

    .. code-block:: python

        scaler = DynamicLossScaler(init_scale=2.0**12, hysteresis=2)
        trainer = L.Trainer(plugins=[AmpPrecision("fp16", scaler=scaler)], max_epochs=1)
        trainer.fit(model, data)
        print(scaler.get_scale())

    The loss is multiplied by a scale, so that small float16 gradients do not become zero. When the gradients
    overflow, the step is skipped and the scale is lowered; after `growth_interval` clean steps in a row it is raised.
    With the defaults the sequence of scales equals torch's wherever the loss is finite and not half precision and the
    scale stays inside the limits. What torch's scaler lacks:

    * limits. Torch's scale can fall to 0, and the next healthy batch is then multiplied by an infinite inverse.
    * non-finite gradients of a non-finite *loss* leave the scale alone: scaling acts on gradients, so lowering it
      cannot help.
    * hysteresis after Megatron-LM: tolerate some overflows before the scale falls.
    * an end: `max_consecutive_skips` skipped steps in a row raise an error that says why.

    It works wherever a `GradScaler` does, in a plain torch loop too. In a Trainer it belongs to
    :class:`~lightning_amp.AmpPrecision`, which decides about steps; this class decides about the scale.

    Args:
        init_scale: The first scale. The default is torch's.
        growth_factor: What the scale is multiplied with after `growth_interval` clean steps in a row; above 1.
        backoff_factor: What the scale is multiplied with after an overflow; between 0 and 1.
        growth_interval: Clean steps in a row before the scale grows.
        hysteresis: How many overflows are tolerated before the scale is lowered. The allowance is refilled only when
            the scale grows (Megatron-LM, `megatron/core/optimizer/grad_scaler.py`); 1 is torch's behaviour, 2 is
            Megatron's default.
        min_scale: The scale never falls below. At the default, `2**-14`, a scaled gradient is *smaller* than
            the true one by the range of normal float16 numbers; a run that gets there has another problem.
        max_scale: The scale never grows above. The default is Apex's `2**24`.
        max_consecutive_skips: Raise :class:`FloatingPointError` after this many consecutive skips.
        device: Device type (`"cuda"`, `"cpu"`, ...). `None` takes the device of the first loss; in a Trainer the
            plugin sets it.
        enabled: `False` makes every method a no-op, as in torch.

    Raises:
        ValueError: If an argument is out of its range.

    Cost: no method waits for the device, but `get_scale`, `state_dict` and pickling, and one read-back in
    `max_consecutive_skips` calls of `update`.

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
        fine, advice = is_number(growth_factor) and growth_factor > 1, "Torch's default is 2.0."
        require(fine, "growth_factor", "a number above 1", growth_factor, advice)
        fine, advice = is_number(backoff_factor) and 0 < backoff_factor < 1, "Torch's default is 0.5."
        require(fine, "backoff_factor", "a number above 0 and below 1", backoff_factor, advice)
        fine, advice = is_number(min_scale) and min_scale > 0, "It is a divisor of gradients; the default is 2.0**-14."
        require(fine, "min_scale", "a number above 0", min_scale, advice)
        fine = is_number(max_scale) and max_scale <= torch.finfo(torch.float32).max
        require(fine, "max_scale", "a number that float32 can hold", max_scale, "The default is 2.0**24.")
        fine = is_number(init_scale) and min_scale <= init_scale <= max_scale
        rule = f"a number from `min_scale`, {literal(min_scale)}, to `max_scale`, {literal(max_scale)}"
        require(fine, "init_scale", rule, init_scale, "Move the limit, or start inside.")
        device_type = "cpu" if device is None else torch.device(device).type
        super().__init__(
            device=device_type,
            init_scale=float(init_scale),
            growth_factor=float(growth_factor),
            backoff_factor=float(backoff_factor),
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.hysteresis = hysteresis
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self.max_consecutive_skips = max_consecutive_skips
        self._start = (float(init_scale), self.min_scale, self.max_scale)
        self._allowance: Tensor | int = hysteresis  # a tensor once the scale lives on a device
        self._loss: Tensor | None = None  # finite while every loss scaled since the last update was
        self._log = RecordLog(max_consecutive_skips, block=max_consecutive_skips)  # only for loops without the plugin

    @classmethod
    def static(cls, scale: float) -> DynamicLossScaler:
        """Return a scaler whose scale never moves; non-finite steps are still skipped and counted.

        Raises:
            ValueError: If `scale` is not a finite number above 0.

        """
        fine = is_number(scale) and scale > 0
        require(fine, "scaler", "a finite number above 0", scale, "A usual static scale is 2.0**10.")
        return cls(scale, min_scale=scale, max_scale=scale)

    # -- scaling -------------------------------------------------------------------------------------------------------

    @override
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss (or an iterable of them) by the scale.

        The first float16 loss lowers `max_scale` to 2**15, with one warning: the gradient that enters a float16 tensor
        is the scale itself, and float16 ends at 65504.

        Args:
            outputs: Tensor of any shape, or nested iterables of them.

        """
        if not self.is_enabled():
            return outputs
        if not isinstance(outputs, Tensor):
            outputs = list(outputs) if isinstance(outputs, Iterable) else outputs
            tensors = [t for t in outputs if isinstance(t, Tensor)] if isinstance(outputs, list) else []
        else:
            tensors = [outputs]
        for tensor in tensors:
            self._notice(tensor)
        return super().scale(outputs)

    def _notice(self, loss: Tensor) -> None:
        _torch.scale_tensor(self, loss.device)
        if loss.dtype == torch.float16 and self.max_scale > HALF_LOSS_CEILING:
            self._lower_ceiling()
        self._loss = merge_losses(self._loss, loss)

    def _lower_ceiling(self) -> None:
        self.max_scale = HALF_LOSS_CEILING
        self.min_scale = min(self.min_scale, HALF_LOSS_CEILING)
        _torch.set_scale_tensor(self, self.scale_tensor.clamp(max=HALF_LOSS_CEILING))
        with own_lines():
            warnings.warn(
                "The loss is float16. Its gradient is the loss scale itself, and float16 ends at 65504, so every step"
                f" at a scale of 2**16 or more would be lost: `max_scale` is now {exact(HALF_LOSS_CEILING)}. A float32"
                " loss (for example `loss.float()` before the mean) lifts this ceiling.",
                UserWarning,
                stacklevel=5,
            )

    @property
    def scale_tensor(self) -> Tensor:
        """Return the scale on its device, shape []. A later update does not change this tensor."""
        return _torch.scale_tensor(self)

    # -- the policy ----------------------------------------------------------------------------------------------------

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale after the step(s) of one batch; see `torch.amp.GradScaler.update`.

        Args:
            new_scale: Sets the scale to this value instead, clamped to the limits.

        Raises:
            FloatingPointError: After `max_consecutive_skips` skipped steps in a row (at most one read-back later).

        """
        if not self.is_enabled():
            return
        if new_scale is not None:
            value = torch.as_tensor(new_scale, dtype=torch.float32, device=self.scale_tensor.device).detach()
            _torch.set_scale_tensor(self, value.reshape(()).clamp(self.min_scale, self.max_scale))
            _torch.take_found_infs(self)
            return
        found_infs = _torch.take_found_infs(self)
        if not found_infs:
            raise AssertionError("No inf checks were recorded prior to update.")  # torch's own words and type
        used = self.scale_tensor
        found_inf = found_infs[0].to(used.device)
        for other in found_infs[1:]:
            found_inf = torch.maximum(found_inf, other.to(used.device))
        loss = self._loss
        self.advance(found_inf, None if loss is None else held_by(loss, found_inf))
        self._log.append(StepResult(Skip.on_device(found_inf), loss, scale=used))
        self._log.close_batch(self.scale_tensor)

    def advance(self, found_inf: Tensor, held: Tensor | None = None) -> None:
        """Apply the policy once, on the device.

        Args:
            found_inf: Float tensor, shape [], 1.0 if gradients of this batch overflowed.
            held: Bool or float tensor, shape [], true if they did because the loss itself was not finite. The batch
                then says nothing about the scale: scale, growth tracker and allowance stay as they are.

        """
        self._loss = None
        scale, tracker = self.scale_tensor, _torch.growth_tracker(self)
        new_scale, new_tracker = scale.clone(), tracker if held is None else tracker.clone()
        _torch.amp_update_scale(
            new_scale,
            new_tracker,
            found_inf,
            self.get_growth_factor(),
            self.get_backoff_factor(),
            self.get_growth_interval(),
        )
        if self.hysteresis > 1:
            overflow = found_inf > 0
            allowance = torch.as_tensor(self._allowance, dtype=torch.int32, device=scale.device)
            new_allowance = allowance - overflow.to(torch.int32)
            new_scale = torch.where(overflow & (new_allowance > 0), scale, new_scale)
            grew = ~overflow & (new_tracker == 0)
            new_allowance = torch.where(grew, self.hysteresis, new_allowance)
            if held is not None:
                new_allowance = torch.where(held.bool(), allowance, new_allowance)
            self._allowance = allowance.copy_(new_allowance)  # in place, for a graph that has captured this
        new_scale.clamp_(self.min_scale, self.max_scale)
        if held is not None:
            stays = held if held.dtype == torch.bool else held > 0
            new_scale = torch.where(stays, scale, new_scale)
            new_tracker = torch.where(stays, tracker, new_tracker)
        _torch.set_scale_tensor(self, new_scale, new_tracker)

    # -- state ---------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start afresh: first scale, original limits, no history."""
        init_scale, self.min_scale, self.max_scale = self._start
        _torch.reset_scale(self, init_scale)
        self._allowance = self.hysteresis
        self._loss = None
        self._log = RecordLog(self.max_consecutive_skips, block=self.max_consecutive_skips)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and ours; a stock `GradScaler` ignores the rest. Waits for the device."""
        state = super().state_dict()
        if state:
            state |= {name: getattr(self, name) for name in _LIMITS}
            state["_hysteresis_tracker"] = int(self._allowance)
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of a stock `GradScaler`.

        What the user passed to the constructor wins over the state, except for the scale itself, which continues; see
        `overridden()` for what differed.

        Raises:
            RuntimeError: If the state comes from a disabled scaler, as in torch.
            ValueError: If an entry is missing or wrong: a scale of 0, NaN, a number that is none.

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
        self._allowance = min(int(state_dict.get("_hysteresis_tracker", self.hysteresis)), self.hysteresis)
        scale = min(max(float(state_dict["scale"]), self.min_scale), self.max_scale)
        _torch.reset_scale(self, scale, state_dict[_torch.GROWTH_TRACKER])
        self._loss = None
        self._log = RecordLog(self.max_consecutive_skips, block=self.max_consecutive_skips)

    def overridden(self, state_dict: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return settings that the user passed and that differ from `state_dict`: name -> (the user's, the state's)."""
        mine = {name: getattr(self, f"get_{name}")() for name in _POLICY} | {n: getattr(self, n) for n in _LIMITS}
        return {
            name: (value, state_dict[name])
            for name, value in mine.items()
            if name in self._explicit and name in state_dict and state_dict[name] != value
        }

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_allowance"] = int(self._allowance)
        state["_loss"] = None
        state["_log"] = RecordLog(self.max_consecutive_skips, block=self.max_consecutive_skips)
        return state

    def __repr__(self) -> str:
        settings = {"init_scale": self._start[0]} | {name: getattr(self, f"get_{name}")() for name in _POLICY}
        settings |= {name: getattr(self, name) for name in _LIMITS}
        return f"{type(self).__name__}({', '.join(f'{name}={literal(value)}' for name, value in settings.items())})"
