"""Check whether values are finite. Results are tensors on the device, unless a docstring says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

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
    ends = [end for tensor in tensors for end in extremes(tensor) if not end.is_meta]
    return torch.isfinite(stack_scalars(ends)).all() if ends else torch.ones((), dtype=torch.bool)


def nonfinite_gradients(parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of parameters whose gradients are not all finite. This waits for the device once."""
    return names_of_nonfinite((name, p.grad) for name, p in parameters.items() if p.grad is not None)


def names_of_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Return the names of tensors that are not all finite, without wrappers. This waits for the device once.

    It leaves out tensors that have no values yet, or cannot be asked, such as quantized ones.
    """
    flags: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        with suppress(Exception):
            flags += [(_modules.plain_name(name), nonfinite(end)) for end in extremes(tensor) if not end.is_meta]
    found = stack_scalars([flag for _, flag in flags]).tolist() if flags else []
    return tuple(dict.fromkeys(name for (name, _), is_bad in zip(flags, found, strict=True) if is_bad))


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars, at least one, on the device of the first: shape [number]."""
    device = scalars[0].device
    # under autocast, `torch.stack` does not accept every half-precision dtype
    return torch.stack([(s.float() if s.itemsize == 2 else s).to(device) for s in scalars])
