"""Derivatives that become a part of the loss (gradient penalties), at a scale of their own. Torch only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.numerics import HALF_DTYPES, all_finite, nonfinite
from lightning_amp.scaling._saved import Saved
from lightning_amp.scaling._scaler import HALF_LOSS_CEILING
from lightning_amp.scaling._step_result import constant

FIRST_SCALE = 2.0**10
"""Leaves derivatives of up to 64 room in float16, and those of 6e-8 all their digits."""

_TOO_SMALL = 2.0**-4  # of the largest scaled derivative
_PATIENCE = 2000.0  # calls, as long as a loss scale waits before it grows


@final
class DerivativeScale:
    """Differentiates half-precision outputs without underflow, and without overflow if it can be helped.

    The loss scale will not do: the derivative of a half-precision output by itself *is* the scale, which must therefore
    stay below 65504; where it is too large the loss is infinite, and of that the loss scale learns nothing. So this
    scale is independent of it. It starts at 2**10. After an overflow (of finite outputs) it falls to a quarter; while
    the largest scaled derivative is below 2**-4 it doubles, up to the loss scale and to 2**15, but not in the 2000
    calls after an overflow. All of this happens on the device, from one call to the next.

    The backward of the loss through the derivative carries the loss scale as ever: what enters at the derivative is
    multiplied with the loss scale and divided by this one, what the derivative's own backward left is multiplied with
    this one.

    """

    def __init__(self) -> None:
        self._current: Tensor | None = None  # both of shape [], never changed in place
        self._patience: Tensor | None = None  # calls until it may grow again

    def grad(
        self, scaler: torch.amp.GradScaler | None, outputs: Any, inputs: Any, *, learn: bool = True, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """As `torch.autograd.grad`; half-precision gradients come back in float32. Does not wait for the device.

        Args:
            scaler: Of the loss that they will be a part of; without one this is `torch.autograd.grad`.
            outputs: What to differentiate: a tensor of any shape, or a sequence of them.
            inputs: What by.
            learn: Whether what is found may change the scale of the next call.
            kwargs: Go to `torch.autograd.grad`.

        """
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if scaler is None:
            return torch.autograd.grad(outputs, inputs, **kwargs)
        device = outputs[0].device
        scale = constant(FIRST_SCALE, device) if self._current is None else self._current.to(device)
        scaled = [_in_float32(output) * scale.to(output.device) for output in outputs]
        grads = torch.autograd.grad(scaled, inputs, **kwargs)
        if learn:
            self._learn(scale, outputs, grads, _torch.scale_tensor(scaler, device).to(device))
        return tuple(None if g is None else _in_float32(g) / scale.to(g.device) for g in grads)

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
        self._patience = torch.where(overflow, _PATIENCE, (patience - 1).clamp(min=0))

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> list[float] | None:
        """Scale and patience; `None` before the first call. Waits for the device."""
        if self._current is None or self._patience is None:
            return None
        return [float(self._current), float(self._patience)]

    def load(self, saved: Saved, key: str) -> None:
        """Continue from :meth:`state`.

        Raises:
            ValueError: If it is something else.

        """
        values = saved.any(key)
        two = isinstance(values, list) and len(values) == 2 and all(type(v) in (int, float) for v in values)
        if not (two and 0 < values[0] <= HALF_LOSS_CEILING and 0 <= values[1] <= _PATIENCE):
            raise saved.wrong(key, f"a scale above 0 and up to {HALF_LOSS_CEILING:.0f}, and a number of calls")
        self._current, self._patience = (torch.tensor(float(v), dtype=torch.float32) for v in values)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
