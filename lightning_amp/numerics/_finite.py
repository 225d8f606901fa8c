"""Check whether values are finite. Results are tensors on the device, unless a docstring says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_amp._compat import _modules
from lightning_amp.numerics._ranges import dense


def nonfinite(scalar: Tensor) -> Tensor:
    """Return whether `scalar` [] is inf or NaN, bool []. Takes two kernels; `isfinite` takes four."""
    return (scalar * 0).ne(0)


def nonfinite_flag(scalar: Tensor) -> Tensor:
    """Return 1.0 if `scalar` [] is inf or NaN, else 0.0: float32 []. Fused optimizers test for exactly 1.0."""
    return nonfinite(scalar).to(torch.float32)


def count_nonfinite(values: Tensor) -> Tensor:
    """Count the values that are inf or NaN: int64 []."""
    return (~torch.isfinite(dense(values.detach()))).sum()


_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the smallest and the largest value, each []; an empty tuple if there are no values, or only integers.

    With a NaN, both are NaN. Takes every layout. Of a sharded tensor it reads this rank's shard, and of complex values
    both parts.

    Cost: one pass and one kernel, hidden from every `TorchDispatchMode`.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    if is_plain and tensor.dtype in _FLOATING:
        with _modules.outside_dispatch_modes():
            return tensor.detach().aminmax() if tensor.numel() else ()
    tensor = tensor.detach()
    values = dense(tensor)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or not values.numel():
        return ()
    return (values.float() if values.itemsize == 1 else values).aminmax()


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values of all tensors are finite: bool [] on their device.

    Integers count as finite, and so does an empty list.
    """
    ends = [end for tensor in tensors for end in extremes(tensor)]
    return torch.isfinite(stack_scalars(ends)).all() if ends else torch.ones((), dtype=torch.bool)


def nonfinite_gradients(parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of parameters whose gradients are not all finite. This waits for the device once."""
    ends = [(n, end) for n, p in parameters.items() if p.grad is not None for end in extremes(p.grad)]
    if not ends:
        return ()
    flags = torch.isfinite(stack_scalars([end for _, end in ends])).tolist()
    return tuple(dict.fromkeys(name for (name, _), fine in zip(ends, flags, strict=True) if not fine))


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars, at least one, on the device of the first: shape [number]."""
    device = scalars[0].device
    # under autocast, `torch.stack` does not accept every half-precision dtype
    return torch.stack([(s.float() if s.itemsize == 2 else s).to(device) for s in scalars])
