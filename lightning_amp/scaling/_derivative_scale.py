"""Compute derivatives that become a part of the loss (gradient penalties), at a scale of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.numerics import HALF_DTYPES, all_finite, nonfinite
from lightning_amp.scaling._checkpoint import Saved
from lightning_amp.scaling._scalars import constant
from lightning_amp.scaling._scaler import HALF_LOSS_CEILING

FIRST_SCALE = 2.0**10
"""Derivatives of up to 64 fit into float16 at this scale, and derivatives of 6e-8 keep all their digits."""

_TOO_SMALL = 2.0**-4  # the scale may grow if the largest scaled derivative is below
_PATIENCE = 2000.0  # calls after an overflow in which it does not grow; as many calls as a loss scale waits steps


@final
class DerivativeScale:
    """Differentiates half-precision outputs, at a scale that prevents underflow and adapts to overflow.

    The loss scale cannot be used. The derivative of a half-precision output by itself *is* the scale, so the scale must
    stay below 65504. If it is too large, the loss is infinite, and a non-finite loss does not lower the loss scale.

    So this scale is independent. It starts at 2**10. After an overflow (of finite outputs) it falls to a quarter. It
    doubles while the largest scaled derivative is below 2**-4, up to the loss scale and to 2**15. After an overflow it
    does not grow for 2000 calls. All of this is computed on the device.

    The backward of the loss still carries the loss scale. Where that backward enters the derivative, autograd divides
    by this scale. In the derivative's own backward it multiplies by this scale again.

    A derivative of a derivative (a PINN's Laplacian) would multiply by it once per order, and overflow where no call
    sees it. So from the first of these on, the scale stays 1, and this is `torch.autograd.grad`.
    """

    def __init__(self) -> None:
        self._current: Tensor | None = None  # scale and patience, of shape [], never changed in place
        self._patience: Tensor | None = None  # calls until it may grow again; infinite after a second derivative
        self._differentiating = False
        self._seen_again = False  # whether this call differentiates the result of another one

    def grad(
        self, scaler: torch.amp.GradScaler | None, outputs: Any, inputs: Any, *, learn: bool = True, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Do what `torch.autograd.grad` does, and return half-precision gradients in float32. Does not wait.

        `scaler` is the scaler of the loss that contains the derivatives; `None` or a disabled one scales nothing. With
        `learn`, this call may change the scale for the next call.
        """
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if scaler is None or not scaler.is_enabled():
            return torch.autograd.grad(outputs, inputs, **kwargs)
        device = outputs[0].device
        scale = constant(FIRST_SCALE, device) if self._current is None else self._current.to(device)
        scaled = [_in_float32(output) * scale.to(output.device) for output in outputs]
        self._differentiating, self._seen_again = True, False
        try:
            grads = torch.autograd.grad(scaled, inputs, **kwargs)
        finally:
            self._differentiating = False
        if self._seen_again:
            self._current, self._patience = constant(1.0, device), constant(math.inf, device)
        elif learn:
            self._learn(scale, outputs, grads, _torch.scale_tensor(scaler, device).to(device))
        results = tuple(None if g is None else _in_float32(g) / scale.to(g.device) for g in grads)
        for result in results:
            if result is not None and result.requires_grad:
                result.register_hook(self._note)
        return results

    def _note(self, _: Tensor) -> None:
        self._seen_again = self._differentiating

    @torch.no_grad()
    def _learn(
        self, scale: Tensor, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], loss_scale: Tensor
    ) -> None:
        device = scale.device
        dense = [g.detach() for g in grads if g is not None and g.numel() and g.layout is torch.strided]
        if not dense:
            return
        largest = torch.stack([torch.linalg.vector_norm(g, torch.inf).to(device, torch.float32) for g in dense]).max()
        overflow = nonfinite(largest) & all_finite(outputs).to(device)
        patience = constant(0.0, device) if self._patience is None else self._patience.to(device)
        limit = loss_scale.clamp(FIRST_SCALE, HALF_LOSS_CEILING)
        grows = (largest < _TOO_SMALL) & (patience <= 0) & (scale < limit)
        smallest = torch.finfo(torch.float16).tiny
        self._current = torch.where(overflow, scale / 4, torch.where(grows, scale * 2, scale)).clamp(min=smallest)
        self._patience = torch.where(overflow & (patience < math.inf), _PATIENCE, (patience - 1).clamp(min=0))

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> list[float] | None:
        """Return scale and patience; `None` before the first call. This waits for the device."""
        if self._current is None or self._patience is None:
            return None
        return [float(self._current), float(self._patience)]

    def load(self, saved: Saved, key: str) -> None:
        """Continue from :meth:`state`. Raise `ValueError` if the entry is not such a state."""

        def fits(values: Any) -> bool:
            two = isinstance(values, list) and len(values) == 2 and all(type(v) in (int, float) for v in values)
            return two and 0 < values[0] <= HALF_LOSS_CEILING and values[1] >= 0

        rule = f"a scale above 0 and up to {HALF_LOSS_CEILING:.0f}, and a number of calls"
        values = saved.take(key, rule, fits)
        self._current, self._patience = (torch.tensor(float(v), dtype=torch.float32) for v in values)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
