"""Steps that an optimizer takes past the plugin, while its gradients are multiplied by the loss scale."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import final

from lightning_amp.scaling import BackwardWatch, OptimizerSteps, Scaled, Unscaled, has_gradients


@final
class UnseenSteps:
    """Raises before such a step, which would move the weights by the gradients times the scale, in silence.

    torch tells it of each step of every optimizer, through its public registry of step hooks, from which it is taken
    at the end of the fit. The plugin's own steps pass. Any other is legal as long as its gradients are not those of a
    scaled backward. For the plugin's optimizers it is known whether they are; for others the watch tells.

    Args:
        steps: The plugin's.
        watch: On their backwards; detached with this.

    Cost: two calls per optimizer step. Nothing without loss scaling, where it is not needed.

    """

    only_looks = True  # a step with no other hook than this one may still be decided on the device

    def __init__(self, steps: OptimizerSteps, watch: BackwardWatch) -> None:
        self._steps, self._watch = steps, watch
        self._handles = [register_optimizer_step_pre_hook(self), register_optimizer_step_post_hook(self)]

    def detach(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch.detach()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look before and after any step (after: for a closure that has run a scaled backward)."""
        steps = self._steps
        if steps.stepping:
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
            why = f"while its gradients are multiplied by the loss scale ({scale:.10g}), unscaled and checked by nobody"
        if self._watch.scale is not None:
            fix = (
                "It was called inside the backward: step after it, by `step()` of what `self.optimizers()` returns, or"
                " use precision 'bf16', which needs no loss scale"
            )
        elif known:
            fix = (
                "Call `step()` of what `self.optimizers()` returns, not of its `.optimizer`, nor with"
                " `use_pl_optimizer=False`"
            )
        else:
            fix = (
                "Return it from `configure_optimizers`, and call `step()` of what `self.optimizers()` returns (several"
                " optimizers need `self.automatic_optimization = False`)"
            )
        return f"`{type(optimizer).__name__}.step()` was called past the precision plugin, {why}. {fix}."
