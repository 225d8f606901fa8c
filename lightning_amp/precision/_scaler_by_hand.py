"""The four calls of torch's own recipe, on the scaler of a run whose steps the plugin owns."""

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

from lightning_amp._compat import _lightning, _torch
from lightning_amp.casting import MethodOverride
from lightning_amp.scaling import OptimizerSteps


@final
class ScalerByHand:
    """Gives `scaler.scale`, `unscale_`, `step` and `update` their meaning while the plugin owns the step.

    Loops get at the scaler by `trainer.precision_plugin.scaler`, to clip by themselves, or to step as in a loop without
    a Trainer. Of gradients, steps and flags it knows nothing here: the plugin keeps them. So each call means what the
    plugin has for it. Gradients are unscaled once, and a step is checked, counted and skipped as any other:

    * `scale(loss).backward()` is a scaled backward; under a backward of the plugin's, which scales, it is an error.
    * `unscale_(optimizer)` is that of the plugin.
    * `step(optimizer)` is that of what `self.optimizers()` returns.
    * `update()` moves the scale for the steps since the last one; the end of the batch does so for those that are left.

    Args:
        scaler: Any; its own methods are back after :meth:`detach`.
        steps: Of the run; made before this, since it multiplies by the scaler's own `scale`.
        plugin: Steps an optimizer that Lightning does not know.
        module: The user's.
        on_backward: Is called when a backward begins that the user has scaled.

    Cost: nothing for who calls none of them.

    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        steps: OptimizerSteps,
        plugin: MixedPrecision,
        module: LightningModule,
        on_backward: Callable[[], None],
    ) -> None:
        self._scaler, self._steps, self._plugin, self._module = scaler, steps, plugin, module
        self._on_backward = on_backward
        self._own_update = scaler.update
        self._stepping: set[int] = set()
        calls = {"scale": self._multiply, "unscale_": self._unscale, "step": self._step, "update": self._update}
        self._overrides = [_Call(scaler, name, call) for name, call in calls.items()]
        for one in self._overrides:
            one.install()

    def detach(self) -> None:
        """Put the scaler's own methods back."""
        for one in self._overrides:
            one.restore()

    def _multiply(self, outputs: Any) -> Any:
        outputs = _as_lists(outputs)
        scaled = self._steps.multiply(outputs)
        self._follow(outputs, scaled, _torch.scale_tensor(self._scaler))
        return scaled

    def _follow(self, output: Any, scaled: Any, scale: Tensor) -> None:
        """Note the backward of each loss when it begins."""
        if not isinstance(scaled, Tensor):
            for one, its_scaled in zip(output, scaled, strict=True):
                self._follow(one, its_scaled, scale)
        elif scaled.requires_grad:
            scaled.register_hook(partial(self._begin_backward, output.detach(), output.grad_fn, scale))

    def _begin_backward(self, loss: Tensor, node: Any, scale: Tensor, gradient: Tensor) -> None:
        if node is not None and not _torch.adds_to_gradients(node):
            return  # `torch.autograd.grad`, of which the user has the result
        if self._steps.scaler is None:
            raise RuntimeError(
                "The loss was multiplied by the loss scale before the run went on in another precision, which has none."
                " Compute the loss anew before its backward."
            )
        self._steps.gradients.begin_backward_by_hand(loss, scale)
        self._on_backward()

    def _unscale(self, optimizer: Any) -> None:
        optimizer = _lightning.unwrap_optimizer(optimizer)
        self._steps.assume_scaled(optimizer)
        self._steps.unscale_(optimizer)

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = _lightning.unwrap_optimizer(optimizer)
        if id(optimizer) in self._stepping or self._steps.stepping:
            raise RuntimeError(
                f"`scaler.step(optimizer)` was called inside of a step of `{type(optimizer).__name__}`, which it would"
                " begin anew. In a plugin with an `optimizer_step` of its own, call `super().optimizer_step(...)`."
            )
        self._steps.assume_scaled(optimizer)
        self._stepping.add(id(optimizer))
        try:
            return self._way_to_step(optimizer)(*args, **kwargs)
        finally:
            self._stepping.remove(id(optimizer))

    def _way_to_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        known: Any = self._module.optimizers()
        for one in known if isinstance(known, Iterable) else [known]:
            if _lightning.unwrap_optimizer(one) is optimizer:
                return one.step
        return partial(self._plugin.optimizer_step, optimizer, self._module, _do_nothing)

    def _update(self, new_scale: float | Tensor | None = None) -> None:
        if new_scale is not None:
            self._steps.replace_scale(partial(self._own_update, new_scale))
        elif _torch.has_found_infs(self._scaler):  # the plugin's own call: nobody else can tell it any
            self._own_update()
        else:
            self._steps.finish_batch()


@final
class _Call(MethodOverride):
    """One of them."""

    def __init__(self, scaler: torch.amp.GradScaler, name: str, call: Callable[..., Any]) -> None:
        super().__init__(scaler, name)
        self._call = call

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._call if self.installed else self.inner)(*args, **kwargs)  # somebody may have kept it


def _as_lists(outputs: Any) -> Any:
    """Return what can be gone through twice: an iterable that is no sequence as a list."""
    if isinstance(outputs, Tensor) or not isinstance(outputs, Iterable):
        return outputs
    return type(outputs)(map(_as_lists, outputs)) if isinstance(outputs, (list, tuple)) else [*map(_as_lists, outputs)]


def _do_nothing() -> None:
    return None
