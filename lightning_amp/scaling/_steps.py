"""One optimizer step, and all those of a fit: have true gradients, know whether they are finite, skip or step.

Read from the top: :meth:`OptimizerSteps.scale_loss`, the backward, :meth:`OptimizerSteps.step`,
:meth:`OptimizerSteps.finish_batch`. Torch only; the docstring of `precision/_amp.py` has the order of events.
"""

from __future__ import annotations

import copy
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
from lightning_amp.scaling._records import RecordLog
from lightning_amp.scaling._scale_update import BatchSteps
from lightning_amp.scaling._step_result import Skip, StepResult


class StepPlan(NamedTuple):
    """What is known before a step about those who look at it.

    Attributes:
        fold: Nobody looks at the true gradients, and what runs before the update would only clip: unscaling, clipping
            and the update of a fused optimizer may be one pass.
        max_norm: What it would clip the total 2-norm to; `None` if it does nothing at all.
        host_must_know: Somebody acts on a skip right after the step.
        asks_for_loss: Somebody wants to know, too, whether the loss was finite.

    """

    fold: bool = False
    max_norm: float | None = None
    host_must_know: bool = False
    asks_for_loss: bool = False


@final
class OptimizerSteps:
    """Every optimizer step of a fit.

    Args:
        scaler: `None` without loss scaling.
        skip_nonfinite: Whether a step with non-finite gradients is skipped where no scaler asks for it.
        log: Gets a record of every attempted step.
        optimizers: In the order of `configure_optimizers`. One that is made inside the training step comes after them.
        watch: Tells which gradients came with a scaled backward; `None`: all did.
        all_reduce_max: Reduces a tensor in place over all ranks; `None` for one process.
        device: That `all_reduce_max` works on; `None`: where the gradients are.

    Attributes:
        gradients: Which of them carry which scale.
        scaler: The one in use; `None` without loss scaling.
        skips: Whether a step with non-finite gradients is skipped.

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
        self._log = log
        self._running: _Step | None = None
        self.gradients = CommonScale(optimizers, log, all_reduce_max, device)
        self._use(scaler, skip_nonfinite, watch)

    def _use(self, scaler: torch.amp.GradScaler | None, skip_nonfinite: bool, watch: BackwardWatch | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._multiply = None if self.scaler is None else self.scaler.scale  # as it is before somebody replaces it
        self.skips = self.scaler is not None or skip_nonfinite
        self._batch = BatchSteps()
        self.gradients.use(self.scaler, watch)

    def change_scaler(
        self, scaler: torch.amp.GradScaler | None, skip_nonfinite: bool, watch: BackwardWatch | None
    ) -> None:
        """Go on with another scaler, or none, between two batches. Gradients that are still there become true ones."""
        self.gradients.release()
        self._use(scaler, skip_nonfinite, watch)

    # -- backward ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Carry what gradients there are to the current scale; returns the loss, scaled."""
        self.gradients.add_loss(loss)
        if self.scaler is None:
            return loss
        scaled = self.multiply(loss)  # first: it makes the scale, and a float16 loss may lower it
        self.gradients.carry(Scaled(_torch.scale_tensor(self.scaler)))
        return scaled

    def multiply(self, outputs: Any) -> Any:
        """Multiply a loss, or nested sequences of them, by the scale, as the scaler does it."""
        assert self.scaler is not None and self._multiply is not None  # noqa: PT018
        if self._batch.round_is_over(self.gradients.num_optimizers):
            self._batch.end_round(self.scaler)
            self._log.complete(_torch.scale_tensor(self.scaler))
        return self._multiply(outputs)

    # -- unscale and check, on request ---------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Make the gradients of `optimizer` true ones, and have its next step skipped if they are not finite now."""
        if self.skips:  # else nothing is scaled, and nothing is checked
            state = self.gradients.state(optimizer)
            self.gradients.examine(state)
            state.keep_found()

    def assume_scaled(self, optimizer: Optimizer) -> None:
        """Take the gradients of an optimizer that is met now as scaled, as who hands it to the scaler says."""
        assert self.scaler is not None
        self.gradients.state(optimizer, Scaled(_torch.scale_tensor(self.scaler)))

    def check_again(self, optimizer: Optimizer) -> None:
        """Have true gradients, and know whether they are finite, after the user may have changed them or added some."""
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
            optimizer: The user's.
            closure: Computes loss and gradients, or nothing if they are there.
            before_update: Everything that may look at, or change, the true gradients before the step; what changes them
                calls :meth:`check_again`.
            plan: Who looks at the step.
            closure_runs_backward: Whether the optimizer is sure to call `closure` if gradients are still to come.
            kwargs: Go to `optimizer.step`.

        Returns:
            What `optimizer.step` returned (on a skip, what the closure did), and what became of the step.

        """
        state = self.gradients.state(optimizer)
        if not closure_runs_backward and not state.always_calls_closure:
            self.gradients.unscale(state)
        step = _Step(self, state, closure, before_update, plan)
        outer, self._running = self._running, step
        try:
            output = step.run(kwargs)
        finally:
            self._running = outer
            if state.decides_on_device:
                _torch.clear_amp_attributes(optimizer)
            state.note_closure_calls(step.calls)
        return output, self._record(state, step.skip)

    @property
    def stepping(self) -> bool:
        """Return whether an optimizer is inside of :meth:`step`; not inside of its closure, where others may step."""
        return self._running is not None and not self._running.in_closure

    def _record(self, state: GradientState, skip: Skip) -> StepResult:
        """Make the one record of a step; the batch completes it with the scale that follows."""
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
        self._log.append(result)
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
        if self.scaler is not None and self._batch.end(self.scaler):
            scale = _torch.scale_tensor(self.scaler)
        self._log.close_batch(scale)

    def replace_scale(self, replace: Callable[[], None]) -> None:
        """Let the user set the scale, in place of what the steps so far would do to it. Waits for the device.

        Gradients that are there keep the one that they have.
        """
        assert self.scaler is not None
        self._batch.clear()
        _torch.set_scale_tensor(self.scaler, _torch.scale_tensor(self.scaler).clone())  # torch's is written in place
        replace()
        self._log.close_batch(_torch.scale_tensor(self.scaler))
        self.gradients.note_scale()


class _SkipStep(BaseException):  # not an Exception: user code between us and the optimizer may catch those
    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.step = step


@final
class _Step:
    """One attempt to step, from the closure that the optimizer calls to skip or update.

    Attributes:
        calls: How often the optimizer has called its closure.
        in_closure: Whether that runs now.
        skip: What became of it.

    """

    __slots__ = (
        *("_before_update", "_closure", "_on_device", "_plan", "_result", "_state", "_steps", "_undo"),
        *("calls", "in_closure", "skip"),
    )

    def __init__(
        self,
        steps: OptimizerSteps,
        state: GradientState,
        closure: Callable[[], Any],
        before_update: Callable[[], None],
        plan: StepPlan,
    ) -> None:
        self.calls = 0
        self.in_closure = False
        self.skip = Skip.NO
        self._steps, self._state, self._plan = steps, state, plan
        self._closure, self._before_update = closure, before_update
        self._undo = _snapshot(state.optimizer) if steps.skips and state.needs_snapshot else None
        self._result: Any = None
        self._on_device = False

    def run(self, kwargs: dict[str, Any]) -> Any:
        """Hand over to the optimizer; returns its output, or that of the closure on a skip."""
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
            if self._undo is not None and self.calls > 1:
                self._undo()
            return self._result

    def _run_closure(self) -> Any:
        """Compute gradients, let everybody look at them, and end the step here if it is to be skipped."""
        self.in_closure = True
        self._result = self._closure()
        self.calls += 1
        if not self._steps.skips:
            self._look()
        else:
            self._prepare()
            if self._state.has_gradients:  # else there is nothing to do, on any rank
                self._decide()
        self._steps.announce(self._state)
        self.in_closure = False
        return self._result

    def _look(self) -> None:
        if not self._plan.fold or self._plan.max_norm is not None:
            self._before_update()

    def _prepare(self) -> None:
        """Have true gradients, or let the fused optimizer make them, and know whether they are finite, on all ranks."""
        state, steps = self._state, self._steps
        fused = state.decides_on_device and _torch.is_fused(state.optimizer)
        self._on_device = fused and not _torch.has_step_hooks(state.optimizer)
        state.unfold()  # what an earlier step has left
        fold = self._plan.fold and self._on_device and state.found_inf is None
        if not (fold and steps.gradients.fold(state, self._plan.max_norm)):
            steps.gradients.examine(state)
            self._look()
        steps.gradients.agree(state)

    def _decide(self) -> None:
        """Skip or not: leave it to the device where the optimizer can, else wait for the answer where that is due."""
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


def _snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Remember parameters and optimizer state (of an optimizer inside the optimizer too); the result puts them back.

    For optimizers that call their closure again after they moved.
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
