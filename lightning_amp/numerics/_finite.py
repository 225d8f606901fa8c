"""The one home of the question "is it finite?". The answers are tensors on the device, unless a docstring says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_amp.numerics._ranges import dense


def nonfinite(scalar: Tensor) -> Tensor:
    """Return whether `scalar` [] is inf or NaN, bool []; two kernels where `isfinite` takes four."""
    return (scalar * 0).ne(0)


def nonfinite_flag(scalar: Tensor) -> Tensor:
    """Return exactly 1.0 if `scalar` [] is inf or NaN, else 0.0; float32, [] (fused optimizers test for 1.0)."""
    return nonfinite(scalar).to(torch.float32)


def count_nonfinite(values: Tensor) -> Tensor:
    """Count the values that are infinite or NaN: int64, shape []."""
    return (~torch.isfinite(dense(values.detach()))).sum()


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values of all tensors are finite: bool, shape [], on their device.

    Takes every layout, looks at this rank's shard of a sharded tensor, and finds integers, and nothing at all, finite.

    Cost: one pass and one kernel for each tensor.

    """
    ends: list[Tensor] = []
    for tensor in tensors:
        values = dense(tensor.to_local() if hasattr(tensor, "to_local") else tensor)  # pyright: ignore[reportAttributeAccessIssue]
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        if values.is_floating_point() and values.numel():
            both = (values.float() if values.itemsize == 1 else values).aminmax()  # NaN is both
            ends += (end.float() if end.itemsize == 2 else end for end in both)  # autocast cannot stack all halves
    return torch.isfinite(stack_scalars(ends)).all() if ends else torch.ones((), dtype=torch.bool)


def nonfinite_gradients(parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Name the parameters whose gradients are not all finite. Waits for the device once."""
    flags = {name: all_finite([p.grad]) for name, p in parameters.items() if p.grad is not None}
    if not flags:
        return ()
    return tuple(name for name, fine in zip(flags, stack_scalars([*flags.values()]).tolist(), strict=True) if not fine)


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Put scalars from whichever device, at least one, beside each other on that of the first: shape [number]."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])
