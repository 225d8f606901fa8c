"""Answer calls of the scaler by hand: `scaler.scale(loss).backward()` and `scaler.unscale_(optimizer)`."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._backward_watch import BackwardWatch


@final
class ByHand:
    """Receives `scaler.scale` and `scaler.unscale_` during a run, and passes them on to its :class:`OptimizerSteps`."""

    def __init__(self, steps: Any, watch: BackwardWatch) -> None:
        self._steps: Any = weakref.proxy(steps)
        self._watch = watch
        self.step_call = steps.calls.step
        self._runs = False  # whether a backward runs whose loss the user has scaled

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of an optimizer."""
        self._steps.unscale_(optimizer)

    def scale(self, outputs: Any) -> Any:
        """Multiply losses whose backward the user runs."""
        if not isinstance(outputs, Tensor):
            many = [self.scale(output) for output in outputs]
            return tuple(many) if isinstance(outputs, tuple) else many
        self._runs = self._watch.in_scaled_backward = False  # after an error inside a backward
        self._steps.begin_backward()
        scaler = self._steps.scaler
        scaled = scaler.multiply(outputs)
        if scaled.requires_grad:
            scaled.register_hook(partial(self._begin, outputs.detach(), scaler.scale_tensor))
        return scaled

    def _begin(self, loss: Tensor, scale: Tensor, gradient: Tensor) -> None:
        """Bring gradients to the scale of the backward that has reached a scaled loss."""
        if self._watch.in_scaled_backward and not self._runs:
            raise RuntimeError(
                "The loss was multiplied by the loss scale twice: by `scaler.scale(loss)`, and by the plugin. Call"
                f" `{self._steps.calls.backward}` without `scaler.scale`."
            )
        if not self._runs:  # otherwise the same backward has begun with another loss
            self._runs = True
            self._watch.__enter__()
            _torch.call_after_backward(self._end)
            self._steps.carry(scale)
        self._steps.add_loss(loss)

    def _end(self) -> None:
        self._runs = False
        self._watch.__exit__()
        self._steps.forget_scale_without_gradients()  # of a `torch.autograd.grad`
