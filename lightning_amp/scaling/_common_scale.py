"""Whose gradients carry which scale: carried to one scale before a backward, unscaled or folded for a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._gradient_state import UNCHECKED, Form, GradientState, Scaled
from lightning_amp.scaling._gradients import parameters
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._scaler import DynamicLossScaler


@final
class CommonScale:
    """The gradients of all optimizers of a fit.

    The one invariant: after a backward, all gradients of all optimizers carry the *current* scale. Gradients that were
    unscaled and are still there when another backward comes are carried back first. So it does not matter in which
    order backward, unscale, clip and step are called, for how many optimizers, or whether an exception came between.

    Args:
        optimizers: In the order of `configure_optimizers`. One that is made inside the training step comes after them.
        log: Tells how far the scale may have fallen.
        all_reduce_max: Reduces a tensor in place over all ranks; `None` for one process.
        device: That `all_reduce_max` works on; `None`: where the gradients are.

    """

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

    def use(self, scaler: torch.amp.GradScaler | None, watch: BackwardWatch | None) -> None:
        """Begin with an enabled scaler, or none; `watch` tells which gradients came with a scaled backward."""
        self.scaler, self.watch = scaler, watch
        self.note_scale()

    def note_scale(self) -> None:
        """Note that the scale was set from outside. Waits for the device."""
        self._first_scale = 1.0 if self.scaler is None else self.scaler.get_scale()

    @property
    def num_optimizers(self) -> int:
        """Count the optimizers that have been met."""
        return len(self._states)

    def state(self, optimizer: Optimizer, if_unknown: Form = UNCHECKED) -> GradientState:
        """Return what is known of an optimizer; one that was made inside the training step gets the next index.

        `if_unknown` is the form of its gradients if it is met now, and nobody has seen where they came from.
        """
        state = self._states.get(id(optimizer))
        if state is None:
            scale = self.scale_of_unknown(optimizer)
            form: Form = if_unknown if scale is None else Scaled(scale)
            state = self._states[id(optimizer)] = GradientState(optimizer, len(self._states), form)
        return state

    def known_state(self, optimizer: Optimizer) -> GradientState | None:
        """Return the same; `None` for an optimizer that has not been met."""
        return self._states.get(id(optimizer))

    def scale_of_unknown(self, optimizer: Optimizer) -> Tensor | None:
        """Return what the gradients of an optimizer that has not been met are multiplied by, []; `None`: by nothing."""
        if self.watch is None:
            return None
        forms = [(state.optimizer, state.form) for state in self._states.values()]
        known = {id(p): f.scale for o, f in forms if isinstance(f, Scaled) for p in parameters(o)}
        return self.watch.scale_of(optimizer, known)

    # -- backward: carry -----------------------------------------------------------------------------------------------

    def add_loss(self, loss: Tensor) -> None:
        """Note the loss of the backward to come."""
        for state in self._states.values():
            state.add_loss(loss, may_have_none=self._all_reduce_max is not None)

    def carry(self, to: Scaled) -> None:
        """Bring all gradients that are still there to the scale of the backward to come."""
        states = [*self._states.values()]
        if len(states) == 1:
            states[0].carry(to, ())
            return
        done: set[int] = set()  # what two optimizers share is carried once
        for state in sorted(states, key=lambda s: isinstance(s.form, Scaled)):
            state.carry(to, done)
            done.update(id(p) for p in parameters(state.optimizer))

    def begin_backward(self) -> None:
        """Note that the backward of a loss begins that the plugin has scaled."""
        if self.watch is not None and self.scaler is not None:
            self.watch.begin(_torch.scale_tensor(self.scaler))

    def end_backward(self) -> None:
        """Note that it is over."""
        if self.watch is not None:
            self.watch.end()

    def begin_backward_by_hand(self, loss: Tensor, scale: Tensor) -> None:
        """Do, from inside a backward of the user's own, what is done before one of the plugin's.

        Args:
            loss: Of any shape; what was multiplied.
            scale: By what, [].

        Raises:
            RuntimeError: If it is the plugin's backward, which multiplied it once more.

        """
        assert self.watch is not None
        if self.watch.plugins_runs:
            raise RuntimeError(
                "The loss was multiplied by the loss scale twice: by `scaler.scale(loss)`, and by the plugin. Call"
                " `self.manual_backward(loss)`, or return `loss` from `training_step`, without `scaler.scale`."
            )
        self.add_loss(loss)
        if self.watch.scale is None:  # else another loss of the same backward was first
            self.carry(Scaled(scale))
            self.watch.begin_by_hand(scale)

    # -- step: unscale, fold, agree ------------------------------------------------------------------------------------

    def unscale(self, state: GradientState) -> None:
        """Make gradients true ones and check them, unless they are."""
        state.unfold()
        if isinstance(state.form, Scaled):
            self._require_scaled(state)
            scale, shared = state.form.scale, self._true_elsewhere(state)
            state.unscale_(scale, shared, may_overflow=self._may_be_below_one())

    def examine(self, state: GradientState) -> None:
        """Make gradients true ones, and know whether they are finite as they are now."""
        state.unfold()  # what an earlier step has left
        if isinstance(state.form, Scaled):
            self.unscale(state)
        elif state.found_inf is None:
            state.check()
        else:
            state.check_again()  # the user had them unscaled

    def fold(self, state: GradientState, max_norm: float | None) -> bool:
        """Leave unscaling and clipping to a fused optimizer; returns whether it can be done."""
        if isinstance(state.form, Scaled):
            if self._true_elsewhere(state):
                return False
            self._require_scaled(state)
        may_overflow = max_norm is None and isinstance(state.form, Scaled) and self._may_be_below_one()
        return state.fold(max_norm, may_overflow=may_overflow)

    def agree(self, state: GradientState) -> None:
        """Agree with all ranks on what is known of the gradients."""
        if self._all_reduce_max is not None:
            state.agree(self._all_reduce_max, self._reduces_on)

    def _require_scaled(self, state: GradientState) -> None:
        """Refuse to divide by the scale what a backward of the user's own, past the plugin, has not multiplied."""
        if self.watch is not None and self.watch.came_plain(state.optimizer):
            raise RuntimeError(
                f"Gradients of `{type(state.optimizer).__name__}` come from `loss.backward()`, which does not multiply"
                " them by the loss scale as those of the other losses are. Call `self.manual_backward(loss)` for each"
                " loss."
            )

    def _true_elsewhere(self, state: GradientState) -> set[int]:
        """Find parameters shared with an optimizer whose gradients were unscaled since the last backward.

        Those that a folded step left are made true.
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
        """Return whether the scale may be so small that a finite value can leave the range when it is unscaled."""
        if not isinstance(self.scaler, DynamicLossScaler):
            return True
        if _torch.is_capturing():  # nobody knows yet what it will be when the graph is replayed
            return self.scaler.min_scale < 1
        # as far as the host knows: exact where it reads the flag of each step, else at most one read-back old
        scale = self._first_scale  # a record from before a resume may be of another precision
        if self._log.last is not None:
            scale = min(scale, self._log.last.next_scale)
        return scale * self.scaler.get_backoff_factor() ** self._log.num_known_skips < 1

    # -- the end -------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Make all gradients that are still there true ones, since the scaler or the run ends."""
        for state in self._states.values():
            if self.watch is None or not self.watch.came_plain(state.optimizer):
                self.unscale(state)
        for state in self._states.values():
            state.release()

    def forget_found(self) -> None:
        """Take off what watches gradients that were not finite."""
        for state in self._states.values():
            state.forget_found()
