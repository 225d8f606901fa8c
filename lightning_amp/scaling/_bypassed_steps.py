"""Refuse optimizer steps on scaled gradients that nothing has checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._backward_watch import BackwardWatch
from lightning_amp.scaling._gradient_state import Scaled, Unscaled
from lightning_amp.scaling._gradients import has_gradients
from lightning_amp.scaling._steps import OptimizerSteps


@final
class Advice(NamedTuple):
    """Calls that the user is advised to make instead, as ends of sentences without a full stop.

    Attributes:
        past: The name of the object that the step should have gone through.
        inside_backward: For a step inside a backward.
        known: For an optimizer that has stepped before.
        unknown: For any other optimizer.

    """

    past: str
    inside_backward: str
    known: str
    unknown: str


_RETIRED: list[BypassedSteps] = []


@final
class BypassedSteps:
    """Raises an error before an optimizer step that bypasses `steps` while its gradients are scaled.

    Without the error, such a step would silently move the weights by the gradients times the scale. Torch calls it for
    each step of every optimizer, through its public registry of step hooks, until :meth:`detach`. Steps of `steps`
    pass, and so do steps on gradients that are not scaled. `steps` knows the scale of its own optimizers'
    gradients; for other optimizers, the hooks on their backwards record it.

    Cost: two calls per optimizer step. Without loss scaling, it is not installed.
    """

    only_looks = True  # a step without other hooks may still be decided on the device

    def __init__(self, steps: OptimizerSteps, watch: BackwardWatch, advice: Advice) -> None:
        while _RETIRED:
            _RETIRED.pop().detach()
        self._steps: OptimizerSteps | None = steps
        self._watch: BackwardWatch | None = watch
        self._advice = advice
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self), register_optimizer_step_post_hook(self)]

    def retire(self) -> None:
        """Check no more steps, and remove the hooks later: torch may be iterating over them now."""
        self._steps = None
        if self._watch is not None:
            self._handles += self._watch.handles
        self._watch = None
        _RETIRED.append(self)

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._watch is not None:
            self._watch.detach()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check before and after every step of any optimizer.

        The check after a step is needed because its closure may have run a scaled backward.
        """
        steps = self._steps
        # a wrapper's step calls the step of the wrapped optimizer
        if steps is None or steps.stepping or _torch.is_wrapper(type(optimizer)):
            return
        state = steps.gradients.known_state(optimizer)
        if state is None:
            scale, unscaled = steps.gradients.scale_of_unknown(optimizer), False
        else:
            form = state.form
            unscaled = isinstance(form, Unscaled) and form.found_inf is not None
            scale = form.scale if isinstance(form, Scaled) else state.used_scale if unscaled else None
        if scale is not None and has_gradients(optimizer):
            raise RuntimeError(self._message(optimizer, float(scale), known=state is not None, unscaled=unscaled))

    def _message(self, optimizer: Optimizer, scale: float, *, known: bool, unscaled: bool) -> str:
        if unscaled:
            why = "which therefore cannot skip it if its gradients have overflowed"
        else:
            why = f"while its gradients are multiplied by the loss scale ({scale:.10g}), and nothing has checked them"
        advice = self._advice
        fix = (
            advice.inside_backward
            if self._watch and self._watch.scale is not None
            else advice.known
            if known
            else advice.unknown
        )
        return f"`{type(optimizer).__name__}.step()` was called past {advice.past}, {why}. {fix}."
