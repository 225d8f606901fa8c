"""Run the optimizer steps of a fit: unscale the gradients, check whether they are finite, and step or skip.

A batch calls :meth:`OptimizerSteps.scale_loss`, runs the backward, then calls :meth:`OptimizerSteps.step` and
:meth:`OptimizerSteps.finish_batch`. This file does not import Lightning; `precision/_events.py` lists the order of
events.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._common_scale import CommonScale
from lightning_amp.scaling._gradient_state import GradientState, Scaled
from lightning_amp.scaling._gradients import parameters
from lightning_amp.scaling._records import RecordLog, Skip, StepResult
from lightning_amp.scaling._scaler import BatchSteps


class StepPlan(NamedTuple):
    """The requirements of hooks, of clipping and of the protection from skipped steps for one step.

    Attributes:
        fold: Whether unscaling, clipping and the update of a fused optimizer may be one pass, since no hook reads the
            true gradients.
        max_norm: With `fold`, the total 2-norm to clip to; `None` for no clipping.
        host_must_know: Whether the caller acts on a skip right after the step.
        asks_for_loss: Whether the caller also reads whether the loss was finite.

    """

    fold: bool = False
    max_norm: float | None = None
    host_must_know: bool = False
    asks_for_loss: bool = False


@final
class OptimizerSteps:
    """All optimizer steps of a fit.

    Args:
        scaler: `None` without loss scaling.
        skip_nonfinite: Whether to skip steps with non-finite gradients even without a scaler.
        log: Gets a record of every attempted step.
        optimizers: In the order of `configure_optimizers`. An optimizer that the training step makes comes after them.
        watch: Records which gradients came from a scaled backward; `None`: all did.
        all_reduce_max: Reduces a tensor in place over all ranks; `None` for one process.
        device: The device that `all_reduce_max` needs; `None`: the device of the gradients.

    Attributes:
        gradients: The gradients of all optimizers, and the scale that they carry.
        log: The records of all attempted steps.
        scaler: The enabled scaler; `None` without loss scaling.
        skips: Whether steps with non-finite gradients are skipped.

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
        self.log = log
        self.gradients = CommonScale(optimizers, log, all_reduce_max, device)
        self._use(scaler, skip_nonfinite, watch)

    def _use(self, scaler: torch.amp.GradScaler | None, skip_nonfinite: bool, watch: BackwardWatch | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        # taken before the plugin overrides the method
        self._multiply = None if self.scaler is None else self.scaler.scale
        self.skips = self.scaler is not None or skip_nonfinite
        self._batch = BatchSteps()
        self.gradients.use(self.scaler, watch)

    def change_scaler(
        self, scaler: torch.amp.GradScaler | None, skip_nonfinite: bool, watch: BackwardWatch | None
    ) -> None:
        """Continue with another scaler, or none, between two batches. Remaining gradients are unscaled."""
        self.gradients.release()
        self._use(scaler, skip_nonfinite, watch)

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled. Gradients that are still there are rescaled to the current scale."""
        self.gradients.add_loss(loss)
        if self.scaler is None:
            return loss
        scaled = self.multiply(loss)  # must come first: this call creates the scale, and a float16 loss may lower it
        self.gradients.carry(Scaled(_torch.scale_tensor(self.scaler)))
        return scaled

    def multiply(self, outputs: Any) -> Any:
        """Multiply a loss, or nested sequences of losses, by the scale."""
        assert self.scaler is not None and self._multiply is not None  # noqa: PT018
        if self._batch.round_is_over(self.gradients.num_optimizers):
            self._batch.end_round(self.scaler)
            self.log.complete(_torch.scale_tensor(self.scaler))
        return self._multiply(outputs)

    # -- unscale and check, on request ---------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer, and skip its next step if they are not finite now."""
        if self.skips:  # otherwise nothing is scaled or checked
            state = self.gradients.state(optimizer)
            self.gradients.examine(state)
            state.keep_found()

    def assume_scaled(self, optimizer: Optimizer) -> None:
        """Treat the gradients of a new optimizer as scaled, since the user passed it to the scaler."""
        assert self.scaler is not None
        self.gradients.state(optimizer, Scaled(_torch.scale_tensor(self.scaler)))

    def check_again(self, optimizer: Optimizer) -> None:
        """Unscale gradients and check them, after the user may have changed or added some."""
        if self.skips:
            self.gradients.examine(self.gradients.state(optimizer))

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
    ) -> tuple[Any, StepResult]:
        """Step or skip.

        Args:
            optimizer: The user's own.
            closure: Computes loss and gradients, unless they are there already.
            before_update: Runs hooks and clipping on the true gradients. Calls :meth:`check_again` after a change.
            plan: Requirements of hooks, clipping and the protection from skipped steps.
            closure_runs_backward: Whether `closure` runs the backward, rather than the user before the step.
            kwargs: Passed to `optimizer.step`.

        Returns:
            The output of `optimizer.step` (on a skip, of the closure), and the outcome of the step.

        """
        state = self.gradients.state(optimizer)
        if not closure_runs_backward and (not state.always_calls_closure or _torch.has_step_hooks(optimizer)):
            self.gradients.unscale(state)
        step = _Step(self, state, closure, before_update, plan)
        outer = _innermost.enter(step)
        try:
            output = step.run(kwargs)
        finally:
            _innermost.enter(outer)
            if state.decides_on_device:
                _torch.clear_amp_attributes(optimizer)
            state.note_closure_calls(step.calls, moved_first=step.moved_first)
        return output, self._record(state, step.skip)

    def skip_left_out(self) -> list[tuple[Optimizer, StepResult]]:
        """Record a skip for each optimizer whose unscaled gradients are not finite and that the user did not step.

        All ranks must call. Waits for the device.
        """
        skips: list[tuple[Optimizer, StepResult]] = []
        for state in self.gradients.checked():
            self.gradients.agree(state)
            if state.wait(asks_for_loss=self.asks_for_loss):
                skips.append((state.optimizer, self._record(state, Skip.YES)))
        return skips

    @property
    def stepping(self) -> bool:
        """Return whether an optimizer is inside :meth:`step`, but outside its closure, where others may step.

        It may be the step of another plugin, which checks the gradients of its own optimizers.
        """
        return _innermost.step is not None and not _innermost.step.in_closure

    def _record(self, state: GradientState, skip: Skip) -> StepResult:
        """Make the one record of a step. The end of the batch adds the next scale."""
        scale, overflow = None, skip
        if self.scaler is not None:
            scale = state.used_scale
            overflow = skip if state.overflow_before_edits is None else skip | state.overflow_before_edits
        result = StepResult(
            skip, state.loss_probe, state.index, scale, overflow, state.has_gradients, known_bad_loss=state.bad_loss
        )
        if self.scaler is not None:
            self._batch.add(result)
        if self.asks_for_loss:
            result.report_loss()
        self.log.append(result)
        state.finish()
        return result

    @property
    def asks_for_loss(self) -> bool:
        """Return whether a listener asks for steps that were applied although their loss was not finite."""
        return self.skips and self.log.wants_losses

    # -- end of batch --------------------------------------------------------------------------------------------------

    def finish_batch(self) -> None:
        """Move the scale once for all steps since the last call, and complete their records.

        Raise `FloatingPointError` if too many steps in a row were skipped.
        """
        scale: Tensor | None = None
        if self.scaler is not None and self._batch.end(self.scaler):
            scale = _torch.scale_tensor(self.scaler)
        self.log.close_batch(scale)

    def drop_batch(self) -> None:
        """Forget the steps that have not moved the scale yet, since a checkpoint was loaded."""
        self._batch.clear()

    def replace_scale(self, replace: Callable[[], None]) -> None:
        """Set the scale on the user's behalf. The steps so far do not move it any more. This waits for the device.

        Gradients that are still there keep their own scale.
        """
        assert self.scaler is not None
        self._batch.clear()
        # torch writes its scale in place, so keep a copy
        _torch.set_scale_tensor(self.scaler, _torch.scale_tensor(self.scaler).clone())
        replace()
        self.log.close_batch(_torch.scale_tensor(self.scaler))
        self.gradients.note_scale()


# derives from BaseException, because user code around the closure may catch every Exception
class _SkipStep(BaseException):
    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.step = step


@final
class _Step:
    """One attempt to step, from the optimizer's closure call to the skip or the update.

    Attributes:
        calls: How often the optimizer has called its closure.
        moved_first: Whether it moved parameters before the first call.
        in_closure: Whether the closure runs now.
        skip: Whether the step was skipped.

    """

    def __init__(
        self,
        steps: OptimizerSteps,
        state: GradientState,
        closure: Callable[[], Any],
        before_update: Callable[[], None],
        plan: StepPlan,
    ) -> None:
        self.calls = 0
        self.moved_first = False
        self.in_closure = False
        self.skip = Skip.NO
        self._steps, self._state, self._plan = steps, state, plan
        self._closure, self._before_update = closure, before_update
        self._undo = _snapshot(state.optimizer) if steps.skips and state.needs_snapshot else None
        self._edits = state.count_edits()
        self._result: Any = None
        self._on_device = False

    def run(self, kwargs: dict[str, Any]) -> Any:
        """Call `optimizer.step`. Return the output of that call, or on a skip the output of the closure."""
        optimizer = self._state.optimizer
        try:
            if self._state.takes_closure:
                return optimizer.step(closure=self._run_closure, **kwargs)
            self._run_closure()
            return optimizer.step(**kwargs)
        except _SkipStep as skip:
            if skip.step is not self:
                raise
            self.skip = Skip.YES
            if self._undo is not None and (self.moved_first or self.calls > 1):
                self._undo()
            return self._result

    def _run_closure(self) -> Any:
        """Compute gradients, run hooks and clipping on them, and leave `optimizer.step` if it must be skipped."""
        if self.calls == 0:
            self.moved_first = self._state.count_edits() != self._edits
        self.in_closure = True
        self._result = self._closure()
        self.calls += 1
        if not self._steps.skips:
            self._run_before_update()
        else:
            self._prepare()
            if self._state.has_gradients:  # on any rank; otherwise there is nothing to skip
                self._decide()
        self._steps.log.announce(self._state.optimizer)
        self.in_closure = False
        return self._result

    def _run_before_update(self) -> None:
        if not self._plan.fold or self._plan.max_norm is not None:
            self._before_update()

    def _prepare(self) -> None:
        """Unscale and check the gradients, or leave the unscaling to a fused optimizer, and agree with all ranks."""
        state, steps = self._state, self._steps
        fused = state.decides_on_device and _torch.is_fused(state.optimizer)
        self._on_device = fused and not _torch.has_step_hooks(state.optimizer)
        state.unfold()  # gradients that an earlier step has left
        fold = self._plan.fold and self._on_device and state.found_inf is None
        if not (fold and steps.gradients.fold(state, self._plan.max_norm)):
            steps.gradients.examine(state)
            self._run_before_update()
        steps.gradients.agree(state)

    def _decide(self) -> None:
        """Raise `_SkipStep` to skip the step, or leave the decision to the device if the optimizer can skip there."""
        state = self._state
        found_inf = state.found_inf
        assert found_inf is not None
        skip = Skip.on_device(found_inf)
        if skip.known is None:
            if self._on_device and not self._host_must_know():
                _torch.set_found_inf(state.optimizer, found_inf)
                self.skip = skip
                return
            if state.wait(asks_for_loss=self._plan.asks_for_loss or self._steps.asks_for_loss):
                raise _SkipStep(self)
        elif skip.known:
            raise _SkipStep(self)
        else:
            state.keep_spare(found_inf)

    def _host_must_know(self) -> bool:
        optimizer = self._state.optimizer
        if isinstance(optimizer, torch.optim.SGD) and _torch.momentum_is_uninitialised(optimizer):
            return True
        return self._plan.host_must_know


@final
class _Innermost(threading.local):
    """The innermost step that runs in a thread."""

    step: _Step | None = None

    def enter(self, step: _Step | None) -> _Step | None:
        """Return the step so far."""
        before, self.step = self.step, step
        return before


_innermost = _Innermost()


def _snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Copy parameters and optimizer state, and return a function that restores them.

    For optimizers that move parameters before a call of their closure. An optimizer inside the optimizer is
    copied too.
    """
    optimizers = [optimizer, *(v for v in vars(optimizer).values() if isinstance(v, Optimizer))]
    params = list({id(p): p for o in optimizers for p in parameters(o)}.values())
    values = [p.detach().clone() for p in params]
    memo = {id(p): p for p in params}
    states = [copy.deepcopy(o.state, memo) for o in optimizers]

    def restore() -> None:
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        for o, state in zip(optimizers, states, strict=True):
            o.state = state

    return restore
