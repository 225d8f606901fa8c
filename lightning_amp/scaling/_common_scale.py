"""Keep the gradients of all optimizers at one loss scale: rescale them before a backward, unscale them for a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._gradient_state import UNCHECKED, Form, GradientState, Scaled, Unscaled
from lightning_amp.scaling._gradients import parameters
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._scaler import DynamicLossScaler


@final
class CommonScale:
    """The gradients of all optimizers of a fit.

    The one invariant: after a backward, all gradients of all optimizers carry the *current* scale. If unscaled
    gradients are still there when another backward begins, they are multiplied by the scale again first. So backward,
    unscale, clip and step may come in any order, for any number of optimizers, and an exception may come between them.
    """

    _backward_call = "self.manual_backward(loss)"

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        log: RecordLog,
        all_reduce_max: Callable[[Tensor], Any] | None,
        device: torch.device | None,
    ) -> None:
        self._states = {id(optimizer): GradientState(optimizer, i) for i, optimizer in enumerate(optimizers)}
        self._log = log
        self._all_reduce_max, self._reduces_on = all_reduce_max, device
        self.expects_more = False  # whether another optimizer is to come

    def use(self, scaler: torch.amp.GradScaler | None, watch: BackwardWatch | None) -> None:
        """Begin with an enabled scaler, or none; `watch` records which gradients came from a scaled backward."""
        self.scaler, self.watch = scaler, watch
        self.note_scale()

    def note_scale(self) -> None:
        """Read the scale again, after other code has set it. This waits for the device."""
        self._first_scale = 1.0 if self.scaler is None else self.scaler.get_scale()

    def call_backward(self, call: str) -> None:
        """Set the user's call of a scaled backward, for errors."""
        self._backward_call = call

    def expect_more(self, more: bool) -> None:
        """Record whether another optimizer is to come."""
        self.expects_more = more

    @property
    def num_optimizers(self) -> int:
        """Return the number of optimizers seen so far, and one more if another is to come."""
        return len(self._states) + self.expects_more

    def state(
        self, optimizer: Optimizer, if_unknown: Form = UNCHECKED, *, carried: Tensor | None = None
    ) -> GradientState:
        """Return the state of an optimizer; a new optimizer gets the next index.

        `if_unknown` is the form of a new optimizer's gradients if no watched backward computed them. `carried` is the
        scale [] to which the caller has brought them, whatever the scale of their own backward was.
        """
        state = self._states.get(id(optimizer))
        if state is None:
            scale = self.scale_of_unknown(optimizer)
            form: Form = if_unknown if scale is None else Scaled(scale if carried is None else carried)
            state = self._states[id(optimizer)] = GradientState(optimizer, len(self._states), form)
        return state

    def known_state(self, optimizer: Optimizer) -> GradientState | None:
        """Return the state of an optimizer; `None` for a new one."""
        return self._states.get(id(optimizer))

    def parameters(self) -> set[int]:
        """Return the ids of all parameters of known optimizers."""
        return {id(p) for state in self._states.values() for p in parameters(state.optimizer)}

    def checked(self) -> list[GradientState]:
        """Return the states whose gradients were unscaled and checked, and not stepped with since."""
        states = self._states.values()
        return [s for s in states if isinstance(s.form, Unscaled) and s.form.found_inf is not None]

    def scale_of_unknown(self, optimizer: Optimizer) -> Tensor | None:
        """Return the scale [] of a new optimizer's gradients; `None` if they are true gradients."""
        if self.watch is None:
            return None
        forms = [(state.optimizer, state.form) for state in self._states.values()]
        known = {id(p): f.scale for o, f in forms if isinstance(f, Scaled) for p in parameters(o)}
        return self.watch.scale_of(optimizer, known)

    # -- backward: carry -----------------------------------------------------------------------------------------------

    def add_loss(self, loss: Tensor) -> None:
        """Record the loss of the next backward."""
        for state in self._states.values():
            state.add_loss(loss, may_have_none=self._all_reduce_max is not None)

    def carry(self, to: Scaled) -> None:
        """Bring all gradients that are still there to the scale of the next backward."""
        states = [*self._states.values()]
        if len(states) == 1:
            states[0].carry(to, ())
            return
        done: set[int] = set()  # parameters that two optimizers share are rescaled once
        for state in sorted(states, key=lambda s: isinstance(s.form, Scaled)):
            state.carry(to, done)
            done.update(id(p) for p in parameters(state.optimizer))

    def begin_backward(self) -> None:
        """Record the beginning of the backward of a loss that the plugin has scaled."""
        if self.watch is not None and self.scaler is not None:
            self.watch.begin(_torch.scale_tensor(self.scaler))

    def end_backward(self) -> None:
        """Record the end of that backward."""
        for state in self._states.values():
            state.end_backward()
        if self.watch is not None:
            self.watch.end()

    def begin_backward_by_hand(self, loss: Tensor, scale: Tensor) -> None:
        """Prepare, inside a backward of the user's own, for the gradients of `loss`, multiplied by `scale` []."""
        assert self.watch is not None
        if self.watch.plugins_runs:
            raise RuntimeError(
                "The loss was multiplied by the loss scale twice: by `scaler.scale(loss)`, and by the plugin. Call"
                " `self.manual_backward(loss)`, or return `loss` from `training_step`, without `scaler.scale`."
            )
        self.add_loss(loss)
        if self.watch.scale is None:  # otherwise the same backward has begun with another loss
            self.carry(Scaled(scale))
            self.watch.begin_by_hand(scale)

    # -- step: unscale, fold, agree ------------------------------------------------------------------------------------

    def unscale(self, state: GradientState) -> None:
        """Unscale scaled gradients and check them."""
        state.unfold()
        if isinstance(state.form, Scaled):
            self.require_scaled(state)
            scale, shared = state.form.scale, self._true_elsewhere(state)
            state.unscale_(scale, shared, may_overflow=self._may_be_below_one())

    def examine(self, state: GradientState) -> None:
        """Unscale gradients, and check whether they are finite now."""
        state.unfold()
        if isinstance(state.form, Scaled):
            self.unscale(state)
        else:
            state.check()

    def fold(self, state: GradientState, max_norm: float | None) -> bool:
        """Leave unscaling and clipping to a fused optimizer. Return whether that is possible."""
        if isinstance(state.form, Scaled):
            if self._true_elsewhere(state):
                return False
            self.require_scaled(state)
        may_overflow = max_norm is None and isinstance(state.form, Scaled) and self._may_be_below_one()
        return state.fold(max_norm, may_overflow=may_overflow)

    def agree(self, state: GradientState) -> None:
        """Combine the flags of all ranks: gradients are not finite if they are not finite on any rank."""
        if self._all_reduce_max is not None:
            state.agree(self._all_reduce_max, self._reduces_on)

    def require_scaled(self, state: GradientState) -> None:
        """Refuse to divide gradients by the scale if the user's own backward has not multiplied them."""
        if self.watch is not None and self.watch.came_plain(state.optimizer):
            raise RuntimeError(
                f"Gradients of `{type(state.optimizer).__name__}` come from `loss.backward()`, which does not multiply"
                f" them by the loss scale. Call `{self._backward_call}` for each loss."
            )

    def _true_elsewhere(self, state: GradientState) -> set[int]:
        """Return the ids of parameters whose gradients another optimizer has unscaled since the last backward.

        If a fused step of that optimizer has left them scaled, unscale them here.
        """
        shared: set[int] = set()
        for other in self._states.values():
            if other is state or isinstance(other.form, Scaled):
                continue
            common = {id(p) for p in parameters(state.optimizer)}.intersection(map(id, parameters(other.optimizer)))
            if common:
                other.unfold()
                shared |= common
        return shared

    def _may_be_below_one(self) -> bool:
        """Return whether the scale may be so small that unscaling takes a finite value out of range."""
        if not isinstance(self.scaler, DynamicLossScaler):
            return True
        # The host has the exact scale if it reads the flag of each step, otherwise the scale of the latest read-back.
        scale = self._first_scale  # a record from before a resume may be of another precision
        if self._log.last is not None:
            scale = min(scale, self._log.last.next_scale)
        return scale * self.scaler.get_backoff_factor() ** self._log.num_known_skips < 1

    # -- the end -------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Unscale all remaining gradients, because the scaler changes or the run ends."""
        for state in self._states.values():
            if self.watch is None or not self.watch.came_plain(state.optimizer):
                self.unscale(state)
        for state in self._states.values():
            state.release()

    def forget_found(self) -> None:
        """Remove the hooks on gradients that were not finite."""
        for state in self._states.values():
            state.forget_found()
