"""Redirect the user's own calls of the scaler to the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final, override

from lightning_amp._compat import _torch
from lightning_amp.casting import MethodOverride
from lightning_amp.scaling import Advice, OptimizerSteps


@final
class ScalerByHand:
    """Redirects the scaler's `scale`, `unscale_`, `step` and `update` to the plugin until :meth:`detach`.

    Manual loops take the scaler from `trainer.precision_plugin.scaler`, to clip, or to step as without a Trainer. The
    plugin keeps the state of gradients, steps and flags, not the scaler. With the redirection, gradients are unscaled
    once, and the step is checked, counted and skipped like any other:

    * `scale(loss).backward()` is a scaled backward; inside of the plugin's backward, which scales, it is an error.
    * `unscale_(optimizer)` calls the plugin's `unscale_`.
    * `step(optimizer)` calls `step()` of the optimizer that `self.optimizers()` returns, or steps an unknown one.
    * `update()` moves the scale for the steps since the last update; the end of the batch does so for later steps.
      A loop may leave out `step(optimizer)` after it found a norm that is not finite: `update()` counts that as a skip.

    `steps` must be made before this, because it multiplies by the scaler's own `scale`. `on_backward` is called when a
    backward begins that the user has scaled, and `skip_left_out` before `update()` moves the scale.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        steps: OptimizerSteps,
        plugin: MixedPrecision,
        module: LightningModule,
        on_backward: Callable[[], None],
        skip_left_out: Callable[[], None],
    ) -> None:
        self._scaler, self._steps, self._plugin, self._module = scaler, steps, plugin, module
        self._on_backward, self._skip_left_out = on_backward, skip_left_out
        self._own_update = scaler.update
        self._stepping: set[int] = set()
        calls = {"scale": self._multiply, "unscale_": self._unscale, "step": self._step, "update": self._update}
        self._overrides = [_Redirect(scaler, name, call) for name, call in calls.items()]
        for each in self._overrides:
            each.install()

    def detach(self) -> None:
        """Put the scaler's own methods back."""
        for each in self._overrides:
            each.restore()

    def _multiply(self, outputs: Any) -> Any:
        outputs = _as_lists(outputs)
        scaled = self._steps.multiply(outputs)
        self._follow(outputs, scaled, _torch.scale_tensor(self._scaler))
        return scaled

    def _follow(self, output: Any, scaled: Any, scale: Tensor) -> None:
        """Record the beginning of the backward of each loss."""
        if not isinstance(scaled, Tensor):
            for one, its_scaled in zip(output, scaled, strict=True):
                self._follow(one, its_scaled, scale)
        elif scaled.requires_grad:
            scaled.register_hook(partial(self._begin_backward, output.detach(), output.grad_fn, scale))

    def _begin_backward(self, loss: Tensor, node: Any, scale: Tensor, gradient: Tensor) -> None:
        if node is not None and not _torch.adds_to_gradients(node):
            return  # `torch.autograd.grad`, whose result the user unscales
        if self._steps.scaler is None:
            raise RuntimeError(
                "The loss was multiplied by the loss scale before the run went on in another precision, which has none."
                " Compute the loss anew before its backward."
            )
        self._steps.gradients.begin_backward_by_hand(loss, scale)
        self._on_backward()

    def _unscale(self, optimizer: Any) -> None:
        optimizer = _torch.unwrap_optimizer(optimizer)
        self._steps.assume_scaled(optimizer)
        self._steps.unscale_(optimizer)

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = _torch.unwrap_optimizer(optimizer)
        if id(optimizer) in self._stepping or self._steps.stepping:
            raise RuntimeError(
                f"`scaler.step(optimizer)` was called inside of a step of `{type(optimizer).__name__}`, and would"
                " begin that step again. In your own `optimizer_step` of a plugin call `super().optimizer_step(...)`."
            )
        self._steps.assume_scaled(optimizer)
        self._stepping.add(id(optimizer))
        try:
            return self._step_method(optimizer)(*args, **kwargs)
        finally:
            self._stepping.remove(id(optimizer))

    def _step_method(self, optimizer: Optimizer) -> Callable[..., Any]:
        known: Any = self._module.optimizers()
        for one in known if isinstance(known, Iterable) else [known]:
            if _torch.unwrap_optimizer(one) is optimizer:
                return one.step
        return partial(self._plugin.optimizer_step, optimizer, self._module, lambda: None)

    def _update(self, new_scale: float | Tensor | None = None) -> None:
        if new_scale is not None:
            self._steps.replace_scale(partial(self._own_update, new_scale))
        elif _torch.has_found_infs(self._scaler):  # only the plugin sets flags, so it makes this call
            self._own_update()
        else:
            self._skip_left_out()
            self._steps.finish_batch()


@final
class _Redirect(MethodOverride):
    """A method of the scaler that calls `call` instead."""

    def __init__(self, scaler: torch.amp.GradScaler, name: str, call: Callable[..., Any]) -> None:
        super().__init__(scaler, name)
        self._call = call

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._call if self.installed else self.inner)(*args, **kwargs)  # the user may have kept this object


def _as_lists(outputs: Any) -> Any:
    """Return nested outputs with every iterable that can be read only once as a list."""
    if isinstance(outputs, Tensor) or not isinstance(outputs, Iterable):
        return outputs
    return type(outputs)(map(_as_lists, outputs)) if isinstance(outputs, (list, tuple)) else [*map(_as_lists, outputs)]


BYPASSED = Advice(
    "the precision plugin",
    "It was called inside the backward: step after it, by `step()` of what `self.optimizers()` returns, or use"
    " precision 'bf16', which needs no loss scale",
    "Call `step()` of what `self.optimizers()` returns, not of its `.optimizer`, nor with `use_pl_optimizer=False`",
    "Return it from `configure_optimizers`, and call `step()` of what `self.optimizers()` returns (several optimizers"
    " need `self.automatic_optimization = False`)",
)
"""Advice for an optimizer that is stepped alone."""
