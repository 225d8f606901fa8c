"""Measure how well values fit into fp16.

Every result is a tensor on the device of the values, so no function waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_amp._compat import _sharding
from lightning_amp.numerics._limits import FP16_LARGEST, FP16_ROUNDS_TO_NORMAL, FP16_ROUNDS_TO_ZERO

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def underflow_counts(values: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Count the values that become zero in fp16, the values that become subnormal, and all values: int64, shape [3].

    The values are multiplied by `scale`, a float or a tensor [], and rounded exactly as by a conversion to fp16.
    Zeros and non-finite values are left out of all counts. The counts of several tensors add up.
    """
    values = values.detach()
    magnitude = values.abs()
    magnitude = (magnitude if magnitude.dtype in (torch.float32, torch.float64) else magnitude.float()) * scale
    zeros, finite = (values == 0).count_nonzero(), torch.isfinite(values).count_nonzero()
    to_zero = (magnitude <= FP16_ROUNDS_TO_ZERO).count_nonzero()  # these values include the zeros; never inf or NaN
    below_normal = (magnitude < FP16_ROUNDS_TO_NORMAL).count_nonzero()
    return torch.stack([to_zero - zeros, below_normal - to_zero, finite - zeros])


def headroom_bits(values: Tensor, scale: float = 1.0) -> Tensor:
    """Return how often `values` times `scale` could be doubled before the largest overflows in fp16, shape [].

    That is log2(65504 / max |values|). It is negative for values outside the range. It is infinite if
    all are zero or there are none, NaN if one is NaN, and minus infinity if one is infinite.
    """
    # Subtract logarithms, since the quotient of a large and a tiny number leaves the range of fp32.
    return math.log2(FP16_LARGEST) - torch.log2(largest(values)) - math.log2(scale)


def dense(values: Tensor) -> Tensor:
    """Return the stored values of a sparse or nested tensor, or this rank's part of a sharded one, as a plain tensor.

    Any other tensor is returned unchanged.
    """
    values = _sharding.local(values)
    if values.is_nested:
        return values.values() if values.layout is torch.jagged else torch.cat([v.flatten() for v in values.unbind()])
    if values.layout is torch.sparse_coo:
        return values.coalesce().values()
    return values.values() if values.layout in _COMPRESSED else values


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, float32 []: 0 if there are no values, NaN if one is NaN."""
    values = dense(values)
    if values.numel() == 0:
        return torch.zeros((), device=values.device)
    return values.detach().abs().max().float()
