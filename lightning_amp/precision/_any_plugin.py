"""What a manual loop needs of the precision plugin, whichever it is: a module that calls these depends on none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp._compat import _lightning, _modules, _torch
from lightning_amp.casting import MethodOverride
from lightning_amp.scaling import parameters


def scaled_grad(trainer: Any, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad` for gradients that become a part of the loss, such as gradient penalties.

    .. code-block:: python

        from lightning_amp.precision import scaled_grad

        def training_step(self, batch, batch_idx):
            batch.requires_grad_()
            score = self(batch).float().mean()
            (gradient,) = scaled_grad(self.trainer, score, batch, create_graph=True)
            return score + 10 * (gradient.norm(dim=1) - 1).square().mean()

    Under :class:`~lightning_amp.AmpPrecision` with loss scaling it is that of the plugin, under any other
    plugin `torch.autograd.grad` itself.

    Args:
        trainer: `self.trainer`.
        outputs: Tensor of any shape, or a sequence of them.
        inputs: What to differentiate by.
        kwargs: Go to `torch.autograd.grad`; `create_graph=True` for a penalty.

    Returns:
        One gradient per input, of its shape; `None` where `allow_unused`.

    """
    ours = getattr(trainer.precision_plugin, "scaled_grad", None)
    return (torch.autograd.grad if ours is None else ours)(outputs, inputs, **kwargs)


def unscale_(trainer: Any, optimizer: Any) -> None:
    """Make the gradients of `optimizer` true ones, for a manual training loop that wants to look or to clip itself.

    .. code-block:: python

        from lightning_amp.precision import unscale_

        def training_step(self, batch, batch_idx):  # with `self.automatic_optimization = False`
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            unscale_(self.trainer, optimizer)
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()

    Idempotent until the next step. Under `AmpPrecision` that step is skipped if the gradients are not finite now, even
    if they are mended afterwards. Without loss scaling there is nothing to divide. Under Lightning's own fp16 plugin it
    is `GradScaler.unscale_`, which the plugin then leaves out in the step that follows; there, as in torch, each
    `unscale_` wants a step before the next backward.

    Args:
        trainer: `self.trainer`.
        optimizer: From `self.optimizers()`.

    """
    plugin = trainer.precision_plugin
    ours = getattr(plugin, "unscale_", None)
    if ours is not None:
        ours(optimizer)
        return
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        _unscale_once(scaler, _lightning.unwrap_optimizer(optimizer))


@final
class _AlreadyUnscaled(MethodOverride):
    """In the place of a scaler's `unscale_` until the step of the optimizers that were unscaled by hand.

    Lightning's plugin unscales in each step, and the scaler refuses to do it twice.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__(scaler, "unscale_")
        self.waiting: set[int] = set()

    def __call__(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self.waiting:
            self.waiting.remove(id(optimizer))
        else:
            self.inner(optimizer)
        if not self.waiting:
            self.restore()


def _unscale_once(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    stand_in = vars(scaler).get("unscale_")
    state = _torch.optimizer_state(scaler, optimizer)
    if _is_same(state.get("lightning_amp"), _note(optimizer)):
        return  # a second call
    try:
        (stand_in.inner if isinstance(stand_in, _AlreadyUnscaled) else scaler.unscale_)(optimizer)
    except BaseException:
        if isinstance(stand_in, _AlreadyUnscaled):
            stand_in.restore()
        raise
    state["lightning_amp"] = _note(optimizer)
    if _torch.unscales_itself(optimizer):
        return  # the plugin leaves it to the fused kernel, which the scaler tells
    if not isinstance(stand_in, _AlreadyUnscaled):
        stand_in = _AlreadyUnscaled(scaler)
        stand_in.install()
    stand_in.waiting.add(id(optimizer))


def _note(optimizer: Optimizer) -> tuple[Tensor | None, int]:
    """Return the first gradient, and how often it was changed: a backward makes a new one, or changes it."""
    first = next((p.grad for p in parameters(optimizer) if p.grad is not None), None)
    return first, 0 if first is None else _modules.version(first)


def _is_same(one: tuple[Tensor | None, int] | None, other: tuple[Tensor | None, int]) -> bool:
    return one is not None and one[0] is other[0] and one[1] == other[1]
