"""Group the gradients of an optimizer into lists for the multi-tensor kernels."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.numerics import HALF_DTYPES, all_finite, nonfinite_flag, widest_dtype
from lightning_amp.scaling import _scalars
from lightning_amp.scaling._scalars import constant, host_value

_LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)


class HalfGradientsError(ValueError):
    """Raised for half-precision parameters, whose gradients cannot be unscaled."""


@final
class Gradients:
    """Real, dense views of the gradients of one optimizer, grouped by device and dtype.

    A complex gradient is viewed as pairs of reals, a sparse one as its values, and a sharded one (DTensor) as its local
    shard. Writing into a view changes the gradient. Parameters whose id is in `leave_out` are left out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, leave_out: Collection[int] = ()) -> None:
        self.plain = True  # dense, real and unsharded
        self.groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        device: torch.device | None = None
        dtype: torch.dtype | None = None
        group: list[Tensor] = []
        for optimizer_group in optimizer.param_groups:
            for param in optimizer_group["params"]:
                grad = param.grad
                if grad is None or (leave_out and id(param) in leave_out):
                    continue
                if type(grad) is not Tensor or grad.layout is not torch.strided:
                    grad = self._view(param, grad)
                # usually all gradients have the same device and dtype
                if grad.dtype is dtype and grad.device == device:
                    group.append(grad)
                    continue
                if grad.is_complex():
                    grad = self._view(param, grad)
                device, dtype = grad.device, grad.dtype
                group = self.groups.setdefault((device, dtype), [])
                group.append(grad)

    def _view(self, param: Any, grad: Any) -> Tensor:
        self.plain = False
        if hasattr(grad, "to_local"):
            grad = grad.to_local()
        if grad.layout is torch.sparse_coo:
            if grad.dtype is torch.float16:  # add duplicates before the check, since their sum may overflow
                param.grad = grad = grad.coalesce()
            grad = _torch.sparse_values(grad)
        elif grad.layout is not torch.strided:
            grad = grad.values()
        if grad.is_complex():
            if grad.is_conj():
                param.grad = grad = grad.resolve_conj()
            grad = torch.view_as_real(grad)
        return grad

    def __bool__(self) -> bool:
        return bool(self.groups)

    def require_full_precision(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `HalfGradientsError` for half-precision gradients, which dividing by the scale would round to zero."""
        if any(dtype in HALF_DTYPES for _, dtype in self.groups):
            half = next(p for p in parameters(optimizer) if p.grad is not None and p.dtype in HALF_DTYPES)
            raise HalfGradientsError(
                f"A parameter of shape {list(half.shape)} is {str(half.dtype).removeprefix('torch.')} when its"
                " optimizer steps. Mixed precision keeps float32 parameters."
            )

    @property
    def device(self) -> torch.device | None:
        """Return the device of all gradients; `None` if there are several, or no gradients."""
        devices = {device for device, _ in self.groups}
        return devices.pop() if len(devices) == 1 else None

    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor` []."""
        for (device, _), grads in self.groups.items():
            _torch.foreach_mul_(grads, factor.to(device))

    def unscale_(self, inverse: Tensor, found_inf: Tensor) -> Tensor:
        """Multiply all gradients by `inverse` []. Return `found_inf` [], set to 1.0 if any value was not finite."""
        for (device, _), grads in self.groups.items():
            flag = found_inf if device == found_inf.device else new_flag(device)
            _torch.amp_unscale_(grads, flag, inverse.to(device))
            if flag is not found_inf:
                torch.maximum(found_inf, flag.to(found_inf.device), out=found_inf)
        return found_inf

    def check(self, found_inf: Tensor) -> Tensor:
        """Return `found_inf` [], set to 1.0 if any value is not finite. Gradients stay as they are."""
        for (device, _), grads in self.groups.items():
            if device.type != "cpu" or found_inf.device.type != "cpu":
                filled = [g for g in grads if g.numel()]  # an empty tensor has no infinity norm
                if filled:
                    norms = torch.stack(_torch.foreach_norm(filled, torch.inf))
                    torch.maximum(found_inf, nonfinite_flag(norms.max()).to(found_inf.device), out=found_inf)
            else:  # the CPU has no fast infinity norm, so multiply by 1
                try:
                    _torch.amp_unscale_(grads, found_inf, constant(1.0, device))
                except RuntimeError:  # an expanded gradient cannot be written to
                    found_inf.logical_or_(all_finite(grads).logical_not())
        return found_inf

    def largest(self) -> Tensor | None:
        """Return the largest magnitude [], or NaN if any value is NaN; `None` without gradients."""
        found: Tensor | None = None
        for grads in self.groups.values():
            filled = [g for g in grads if g.numel()]
            if filled:
                norms = torch.stack(_torch.foreach_norm(filled, torch.inf)).max().float()
                found = norms if found is None else torch.maximum(found, norms.to(found.device))
        return found

    def true_norm(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the 2-norm over all gradients of one device, divided by `scale` [], and the non-finite flag.

        Both are float32 []. The flag is `None` if the norm is in host memory and not finite. The caller then has to
        check each gradient.

        On a device, one pass over the gradients gives both. The norm is summed in float64, which can hold the squares
        of all float32 numbers. The norm then becomes inf from 1.8e19 on, as in `clip_grad_norm_`, which sums in
        float32. In that case, clipping turns finite gradients into 0, and the step is applied.
        """
        device, sample = next((device, grads[0]) for (device, _), grads in self.groups.items())
        if _scalars.in_host_memory(sample):
            norm = self._norm(None, scale)
            return norm, nonfinite_flag(norm) if math.isfinite(host_value(norm)) else None
        wide = widest_dtype(device)
        norm = self._norm(wide, scale)
        if wide == torch.float32:  # a device without float64, such as MPS, reads the gradients once more
            found_inf = self.check(new_flag(device))
        else:  # in float32, because dividing by a scale below 1 may exceed its range
            found_inf = nonfinite_flag(norm if scale is None else norm.float())
        return torch.where(norm > _LARGEST_NORM, torch.inf, norm).float(), found_inf

    def _norm(self, dtype: torch.dtype | None, scale: Tensor | None) -> Tensor:
        norms = [n for grads in self.groups.values() for n in _torch.foreach_norm(grads, 2.0, dtype)]
        norm = torch.linalg.vector_norm(torch.stack([n.to(dtype or torch.float32) for n in norms]))
        return norm if scale is None else norm / scale


def new_flag(device: torch.device) -> Tensor:
    """Return a flag [] of 0.0 to which a check may write."""
    return torch.zeros((), device=device, dtype=torch.float32)


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Iterate over all parameters of an optimizer, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter has a gradient. This stops at the first gradient."""
    return any(param.grad is not None for param in parameters(optimizer))


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, computed in float64 (if the device has it), as `GradScaler.unscale_` does."""
    return scale.to(widest_dtype(scale.device)).reciprocal().float()
