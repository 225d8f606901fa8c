"""Steps that an optimizer takes past the plugin, while its gradients are multiplied by the loss scale."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_amp.scaling import OptimizerSteps, Window, has_gradients, parameters


class UnseenSteps:
    """Raises before such a step, which would move the weights by the gradients times the scale, in silence.

    torch tells it of each step of every optimizer, through its public registry of step hooks, from which it is taken
    at the end of the fit. The plugin's own steps pass. Any other is legal as long as its gradients are not those of a
    scaled backward. For the plugin's optimizers it is known whether they are; the parameters that none of them has tell
    by a hook of their own, whether their latest gradient came with a scaled backward or with one of the user's.

    Args:
        module: The user's.
        steps: The plugin's.

    Cost: two calls per optimizer step. Nothing without loss scaling, where it is not needed.

    """

    only_looks = True  # a step with no other hook than this one may still be decided on the device

    def __init__(self, module: LightningModule, steps: OptimizerSteps) -> None:
        self._module = module
        self._steps = steps
        self._watched: dict[int, Any] = {}  # by id of the parameter: what takes its hook off
        self._scales: dict[int, Tensor] = {}  # that of its gradient, if it came with a scaled backward
        self._handles = [register_optimizer_step_pre_hook(self), register_optimizer_step_post_hook(self)]
        known = {id(p) for window in steps.windows.values() for p in parameters(window.optimizer)}
        for parameter in module.parameters():
            if id(parameter) not in known:
                self._watch(parameter)
        steps.scale_of_unknown = self._scale_of_unknown
        for window in steps.windows.values():
            self._watch_one(window)

    def _watch_one(self, window: Window) -> None:
        """Let one parameter of an optimizer tell whether its gradients come with a scaled backward."""
        first = next((p for p in parameters(window.optimizer) if p.requires_grad and p.is_leaf), None)
        if first is None:
            return
        plain = False

        def note(_: Any) -> None:
            nonlocal plain
            plain = self._steps.backward_scale is None

        self._handles.append(first.register_post_accumulate_grad_hook(note))
        window.plain_backward = lambda: plain and first.grad is not None

    def detach(self) -> None:
        """All hooks are gone."""
        self._steps.scale_of_unknown = None
        for window in self._steps.windows.values():
            window.plain_backward = None
        for handle in (*self._handles, *self._watched.values()):
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._scales.clear()

    def _watch(self, parameter: Any) -> None:
        if id(parameter) in self._watched or not parameter.requires_grad or not parameter.is_leaf:
            return

        def note(p: Any) -> None:
            if self._steps.backward_scale is None:
                self._scales.pop(id(p), None)
            else:
                self._scales[id(p)] = self._steps.backward_scale

        self._watched[id(parameter)] = parameter.register_post_accumulate_grad_hook(note)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before and after any step (after: for a closure that has run a scaled backward)."""
        steps = self._steps
        if steps.stepping:
            return
        window = steps.windows.get(id(optimizer))
        unscaled = False
        if window is None:
            scale = self._scale_of_unknown(optimizer)
        else:
            unscaled = window.scale is None and window.found_inf is not None
            scale = window.used_scale if unscaled else window.scale
        if scale is not None and has_gradients(optimizer):
            raise RuntimeError(self._message(optimizer, float(scale), known=window is not None, unscaled=unscaled))

    def _scale_of_unknown(self, optimizer: Optimizer) -> Tensor | None:
        """What the gradients of an optimizer that the plugin has not met are multiplied by; `None`: they are true."""
        steps = self._steps
        mine = [p for p in parameters(optimizer) if p.grad is not None]
        if mine and steps.backward_scale is not None:
            return steps.backward_scale
        scales = dict(self._scales)
        for window in steps.windows.values():
            if window.scale is not None:
                scales.update((id(p), window.scale) for p in parameters(window.optimizer))
        for parameter in mine:
            scale = scales.get(id(parameter))
            if scale is not None:
                return scale
            self._watch(parameter)  # one that is not in the module, from now on
        return None

    def _message(self, optimizer: Optimizer, scale: float, *, known: bool, unscaled: bool) -> str:
        if unscaled:
            why = "which therefore cannot skip it if its gradients have overflowed"
        else:
            why = f"while its gradients are multiplied by the loss scale ({scale:.10g}), unscaled and checked by nobody"
        if self._steps.backward_scale is not None:
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
