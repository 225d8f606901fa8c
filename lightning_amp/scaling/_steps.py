"""The arithmetic of an optimizer step: which gradients are scaled by what, whether they are finite, skip or step.

Torch only. `precision/_events.py` has the order of events of a training step, of which this is the second half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._gradient_state import UNSEEN, Form, GradientState, Scaled
from lightning_amp.scaling._gradients import parameters
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._scale_update import Attempt, BatchAttempts
from lightning_amp.scaling._scaler import DynamicLossScaler
from lightning_amp.scaling._skip import Skip
from lightning_amp.scaling._step import Step, StepPlan, StepResult


@final
class OptimizerSteps:
    """Every optimizer step of a fit.

    The one invariant: after a backward, all gradients of all optimizers carry the *current* scale. Gradients that were
    unscaled and are still there when another backward comes are carried back first. So it does not matter in which
    order backward, unscale, clip and step are called, for how many optimizers, or whether an exception came between.

    Args:
        scaler: `None` without loss scaling.
        skip_nonfinite: Whether a step with non-finite gradients is skipped where no scaler asks for it.
        log: Gets a record of every attempted step.
        optimizers: In the order of `configure_optimizers`. One that is made inside the training step comes after them.
        watch: Tells which gradients came with a scaled backward; `None`: all did.
        all_reduce_max: Reduces a tensor in place over all ranks; `None` for one process.
        device: That `all_reduce_max` works on; `None`: where the gradients are.

    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler | None,
        skip_nonfinite: bool,
        log: RecordLog,
        optimizers: Iterable[Optimizer] = (),
        *,
        watch: BackwardWatch | None = None,
        all_reduce_max: Callable[[Tensor], Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._use(scaler, skip_nonfinite)
        self._step: Step | None = None  # that runs
        self._log = log
        self._states = {id(optimizer): GradientState(optimizer, i) for i, optimizer in enumerate(optimizers)}
        self._watch = watch
        self._all_reduce_max = all_reduce_max
        self._reduces_on = device
        self._attempts = BatchAttempts()
        self.restart_scale()

    def _use(self, scaler: torch.amp.GradScaler | None, skip_nonfinite: bool) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._multiply = None if self.scaler is None else self.scaler.scale  # as it is before somebody replaces it
        self.skips = self.scaler is not None or skip_nonfinite

    def restart_scale(self) -> None:
        """Note that the scale was set from outside. Waits for the device."""
        self._first_scale = 1.0 if self.scaler is None else self.scaler.get_scale()

    def change_scaler(
        self, scaler: torch.amp.GradScaler | None, skip_nonfinite: bool, watch: BackwardWatch | None
    ) -> None:
        """Go on with another scaler, or none, between two batches. Gradients that are still there become true ones."""
        self.release()
        self._use(scaler, skip_nonfinite)
        self._watch = watch
        self._attempts = BatchAttempts()
        self.restart_scale()

    def release(self) -> None:
        """Make all gradients that are still there true ones, since the scaler or the run ends."""
        for state in self._states.values():
            if self._watch is None or not self._watch.came_plain(state.optimizer):
                self.unscale(state)
        for state in self._states.values():
            state.release()

    def forget_found(self) -> None:
        """Take off what watches gradients that were not finite."""
        for state in self._states.values():
            state.forget_found()

    def state(self, optimizer: Optimizer, if_unknown: Form = UNSEEN) -> GradientState:
        """Return what is known of an optimizer; one that was made inside the training step gets the next index.

        Args:
            optimizer: Whose.
            if_unknown: The form of its gradients if it is met now, and nobody has seen where they came from.

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
        if self._watch is None:
            return None
        forms = [(state.optimizer, state.form) for state in self._states.values()]
        known = {id(p): f.scale for o, f in forms if isinstance(f, Scaled) for p in parameters(o)}
        return self._watch.scale_of(optimizer, known)

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Carry what gradients there are to the current scale; returns the loss, scaled."""
        self._add_loss(loss)
        if self.scaler is None:
            return loss
        scaled = self.multiply(loss)  # first: it makes the scale, and a float16 loss may lower it
        self._carry(Scaled(_torch.scale_tensor(self.scaler)))
        return scaled

    def multiply(self, outputs: Any) -> Any:
        """Multiply a loss, or nested sequences of them, by the scale, as the scaler does it."""
        assert self.scaler is not None and self._multiply is not None  # noqa: PT018
        if self._attempts.round_is_over(len(self._states)):
            self._attempts.end_round(self.scaler)
            self._log.complete(_torch.scale_tensor(self.scaler))
        return self._multiply(outputs)

    def _add_loss(self, loss: Tensor) -> None:
        for state in self._states.values():
            state.add_loss(loss, may_have_none=self._all_reduce_max is not None)

    def _carry(self, to: Scaled) -> None:
        states = [*self._states.values()]
        if len(states) == 1:
            states[0].carry(to, ())
            return
        done: set[int] = set()  # what two optimizers share is carried once
        for state in sorted(states, key=lambda s: isinstance(s.form, Scaled)):
            state.carry(to, done)
            done.update(id(p) for p in parameters(state.optimizer))

    def begin_backward(self) -> None:
        """Note that the backward of a loss from :meth:`scale_loss` begins."""
        if self._watch is not None and self.scaler is not None:
            self._watch.begin(_torch.scale_tensor(self.scaler))

    def end_backward(self) -> None:
        """Note that it is over."""
        if self._watch is not None:
            self._watch.end()

    def begin_backward_by_hand(self, loss: Tensor, scale: Tensor) -> None:
        """Do, from inside a backward of the user's own, what :meth:`scale_loss` does before one.

        Args:
            loss: Of any shape; what was multiplied.
            scale: By what, [].

        Raises:
            RuntimeError: If it is the plugin's backward, which multiplied it once more.

        """
        assert self._watch is not None
        if self._watch.plugins_runs:
            raise RuntimeError(
                "The loss was multiplied by the loss scale twice: by `scaler.scale(loss)`, and by the plugin. Call"
                " `self.manual_backward(loss)`, or return `loss` from `training_step`, without `scaler.scale`."
            )
        self._add_loss(loss)
        if self._watch.scale is None:  # else another loss of the same backward was first
            self._carry(Scaled(scale))
            self._watch.begin_by_hand(scale)

    # -- unscale and check ---------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Make the gradients of `optimizer` true ones, and have its next step skipped if they are not finite now."""
        if self.skips:  # else nothing is scaled, and nothing is checked
            state = self.state(optimizer)
            self.examine(state)
            state.keep_found()

    def adopt(self, optimizer: Optimizer) -> None:
        """Take the gradients of an optimizer that is met now as scaled, as who hands it to the scaler says."""
        assert self.scaler is not None
        self.state(optimizer, Scaled(_torch.scale_tensor(self.scaler)))

    def check_again(self, optimizer: Optimizer) -> None:
        """Have true gradients, and know whether they are finite, after the user may have changed them or added some."""
        if self.skips:
            self.examine(self.state(optimizer))

    def _require_scaled(self, state: GradientState) -> None:
        """Refuse to divide by the scale what a backward of the user's own, past the plugin, has not multiplied."""
        if self._watch is not None and self._watch.came_plain(state.optimizer):
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

    def _scale_may_be_below_one(self) -> bool:
        if not isinstance(self.scaler, DynamicLossScaler):
            return True
        if _torch.is_capturing():  # nobody knows yet what it will be when the graph is replayed
            return self.scaler.min_scale < 1
        # as far as the host knows: exact where it reads the flag of each step, else at most one read-back old
        scale = self._first_scale  # a record from before a resume may be of another precision
        if self._log.last is not None:
            scale = min(scale, self._log.last.next_scale)
        return scale * self.scaler.get_backoff_factor() ** self._log.num_known_skips < 1

    # -- step ----------------------------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        before_update: Callable[[], None],
        plan: StepPlan,
        *,
        closure_runs_backward: bool = True,
        **kwargs: Any,
    ) -> StepResult:
        """Step or skip.

        Args:
            optimizer: The user's.
            closure: Computes loss and gradients, or nothing if they are there.
            before_update: Everything that may look at, or change, the true gradients before the step; what changes them
                calls :meth:`check_again`.
            plan: See :class:`StepPlan`.
            closure_runs_backward: Whether the optimizer is sure to call `closure` if gradients are still to come.
            kwargs: Go to `optimizer.step`.

        """
        state = self.state(optimizer)
        if not closure_runs_backward and not state.always_calls_closure:
            self.unscale(state)
        step = Step(self, state, closure, before_update, plan)
        outer, self._step = self._step, step
        try:
            output = step.run(kwargs)
        finally:
            self._step = outer
            if state.decides_on_device:
                _torch.clear_amp_attributes(optimizer)
            state.note_closure_calls(step.calls)
        return self._record(state, output, step.skip)

    @property
    def stepping(self) -> bool:
        """Return whether an optimizer is inside of :meth:`step`; not inside of its closure, where others may step."""
        return self._step is not None and not self._step.in_closure

    def unscale(self, state: GradientState) -> None:
        """Make gradients true ones and check them, unless they are."""
        state.unfold()
        if isinstance(state.form, Scaled):
            self._require_scaled(state)
            scale, shared = state.form.scale, self._true_elsewhere(state)
            state.unscale_(scale, shared, may_overflow=self._scale_may_be_below_one())

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
        may_overflow = max_norm is None and isinstance(state.form, Scaled) and self._scale_may_be_below_one()
        return state.fold(max_norm, may_overflow=may_overflow)

    def agree(self, state: GradientState) -> None:
        """Agree with all ranks on what is known of the gradients."""
        if self._all_reduce_max is not None:
            state.agree(self._all_reduce_max, self._reduces_on)

    def _record(self, state: GradientState, output: Any, skip: Skip) -> StepResult:
        result = StepResult(output, skip, state.loss_probe, state.bad_loss)
        scale = None
        if self.scaler is not None:
            scale, before = state.used_scale, state.overflow
            overflow = skip if before is None else skip | before
            self._attempts.add(Attempt(state.index, overflow, result.loss_probe, state.has_gradients))
        bad_loss = result.bad_loss if self.asks_for_loss else Skip.NO
        self._log.append(state.index, scale, skip, None if skip is Skip.NO else result.loss_probe, bad_loss)
        state.finish()
        return result

    @property
    def asks_for_loss(self) -> bool:
        """Return whether somebody wants to know of steps taken with a loss, and no gradient, that is not finite."""
        return self.skips and self._log.wants_losses

    def announce(self, state: GradientState) -> None:
        """Tell who listens that the update of an optimizer comes next, unless the device skips it."""
        self._log.announce(state.optimizer)

    # -- end of batch --------------------------------------------------------------------------------------------------

    def finish_batch(self) -> None:
        """Move the scale, once, for all steps since the last call; close their records.

        Raises:
            FloatingPointError: If too many steps in a row were skipped.

        """
        scale: Tensor | None = None
        if self.scaler is not None and self._attempts.end_batch(self.scaler):
            scale = _torch.scale_tensor(self.scaler)
        self._log.close_batch(scale)

    def replace_scale(self, replace: Callable[[], None]) -> None:
        """Let the user set the scale, in place of what the steps so far would do to it. Waits for the device.

        Gradients that are there keep the one that they have.
        """
        assert self.scaler is not None
        self._attempts.clear()
        _torch.set_scale_tensor(self.scaler, _torch.scale_tensor(self.scaler).clone())  # torch's is written in place
        replace()
        self._log.close_batch(_torch.scale_tensor(self.scaler))
        self.restart_scale()
