"""One optimizer step, from the closure that the optimizer calls to skip or update. Torch only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._gradient_state import GradientState
from lightning_amp.scaling._gradients import parameters
from lightning_amp.scaling._skip import Skip

if TYPE_CHECKING:
    from lightning_amp.scaling._steps import OptimizerSteps


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


class StepResult(NamedTuple):
    """What became of a step.

    Attributes:
        output: What `optimizer.step` returned; on a skip, what the closure did.
        skip: Whether it was skipped.
        loss_probe: Finite exactly if the losses of this step were, []; `None` if nobody backpropagated one.
        known_bad_loss: The same, where the host has read it; else `None`.

    """

    output: Any
    skip: Skip
    loss_probe: Tensor | None
    known_bad_loss: Skip | None = None

    @property
    def bad_loss(self) -> Skip:
        """Return whether the loss was not finite, which asks for a skip whatever its gradients were mended to."""
        return self.known_bad_loss or Skip.if_nonfinite(self.loss_probe)


class _SkipStep(BaseException):  # not an Exception: user code between us and the optimizer may catch those
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step


@final
class Step:
    """One attempt to step.

    Args:
        steps: Of which it is one.
        state: The gradients.
        closure: The user's.
        before_update: Looks at, or changes, the true gradients.
        plan: Who looks.

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
        self._undo = snapshot(state.optimizer) if steps.skips and state.needs_snapshot else None
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
        if not (fold and steps.fold(state, self._plan.max_norm)):
            steps.examine(state)
            self._look()
        steps.agree(state)

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


def snapshot(optimizer: Optimizer) -> Callable[[], None]:
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
