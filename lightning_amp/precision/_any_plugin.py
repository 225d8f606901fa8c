"""Let a manual loop differentiate and unscale under any precision plugin, so that modules depend on no plugin."""

from __future__ import annotations

from typing import Any

import torch


def scaled_grad(trainer: Any, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Differentiate as `torch.autograd.grad`, for gradients that become a part of the loss, as in gradient penalties.

    .. code-block:: python

        from lightning_amp.precision import scaled_grad

        def training_step(self, batch, batch_idx):
            batch.requires_grad_()
            score = self(batch).float().mean()
            (gradient,) = scaled_grad(self.trainer, score, batch, create_graph=True)
            return score + 10 * (gradient.norm(dim=1) - 1).square().mean()

    Under :class:`~lightning_amp.AmpPrecision` with loss scaling it calls the plugin's `scaled_grad`, under any other
    plugin `torch.autograd.grad` itself.

    Args:
        trainer: `self.trainer`.
        outputs: Tensor of any shape, or a sequence of tensors.
        inputs: Tensors to differentiate by.
        kwargs: Passed to `torch.autograd.grad`; `create_graph=True` for a penalty.

    Returns:
        One gradient per input, of its shape; `None` where `allow_unused` permits it.

    """
    ours = getattr(trainer.precision_plugin, "scaled_grad", None)
    return (torch.autograd.grad if ours is None else ours)(outputs, inputs, **kwargs)


def unscale_(trainer: Any, optimizer: Any) -> None:
    """Unscale the gradients of `optimizer`, for a manual training loop that reads or clips them itself.

    .. code-block:: python

        from lightning_amp.precision import unscale_

        def training_step(self, batch, batch_idx):  # with `self.automatic_optimization = False`
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            unscale_(self.trainer, optimizer)
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()

    A second call before the next step changes nothing. Under `AmpPrecision` that step is skipped if the gradients are
    not finite now, even if you replace these values afterwards. Without loss scaling it changes no gradient.

    Args:
        trainer: `self.trainer`.
        optimizer: From `self.optimizers()`.

    Raises:
        RuntimeError: Under Lightning's own fp16 plugin, which unscales in the step, and whose scaler refuses twice.

    """
    plugin = trainer.precision_plugin
    ours = getattr(plugin, "unscale_", None)
    if ours is not None:
        ours(optimizer)
        return
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        raise RuntimeError(
            f"`unscale_` cannot unscale under `{type(plugin).__name__}`, which unscales in the step itself, and whose"
            " scaler refuses a second time. Use `lightning_amp.AmpPrecision('fp16')`, or precision 'bf16-mixed', which"
            " needs no loss scale."
        )
