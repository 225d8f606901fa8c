"""What a training loop of the user's own asks the plugin for: true gradients, and derivatives inside the loss."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from lightning_amp._compat import _lightning
from lightning_amp.precision._clipping import Clipping
from lightning_amp.scaling import DerivativeScale

_NOTHING = contextlib.nullcontext()


class ManualHelpers(Clipping):
    """`unscale_` and `scaled_grad`, beside `clip_gradients`."""

    _derivatives: DerivativeScale

    def unscale_(self, optimizer: Any) -> None:
        """Make the gradients of `optimizer` true ones, for a manual training loop that wants to look or to clip itself.

        Idempotent within a step; does nothing without loss scaling. A backward that follows carries the gradients back
        to the scale, so accumulating after looking is fine.

        Args:
            optimizer: From `self.optimizers()`, or the user's own.

        """
        self._steps.unscale_(_lightning.unwrap_optimizer(optimizer))

    def scaled_grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """`torch.autograd.grad` through a scale, so that small gradients neither become zero in fp16 nor overflow.

        For gradient penalties: call it inside `training_step` with `create_graph=True`; what comes back are true
        gradients, in float32 where they would be half precision. The scale is not that of the loss, and adapts by
        itself (:class:`~lightning_amp.scaling.DerivativeScale`): if it was too large the loss is infinite, the step is
        skipped, and the next one has a quarter of it. Without loss scaling this is `torch.autograd.grad`.

        :func:`lightning_amp.precision.scaled_grad` is the same for modules that do not want to depend on this plugin.

        Args:
            outputs: Tensor of any shape, or a sequence of them.
            inputs: What to differentiate by.
            kwargs: Go to `torch.autograd.grad`; `grad_outputs` too.

        Returns:
            One gradient per input, of its shape; `None` where `allow_unused`.

        """
        with self._autocast_off():
            return self._derivatives.grad(self._steps.scaler, outputs, inputs, **kwargs)

    def replayed_grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """:meth:`scaled_grad` for a step that a callback runs a second time: its scale stays as it is."""
        with self._autocast_off():
            return self._derivatives.grad(self._steps.scaler, outputs, inputs, learn=False, **kwargs)

    def _autocast_off(self) -> contextlib.AbstractContextManager[Any]:
        if torch.is_autocast_enabled(self.device):
            return torch.autocast(self.device, enabled=False)
        return _NOTHING
