"""How well values fit into a format. Every result is a tensor on the device of the values: nothing waits for it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_amp._compat import _modules
from lightning_amp.numerics._limits import limits

Scale = float | Tensor

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Underflow(NamedTuple):
    """Shares of the finite non-zero values, each of shape [].

    Attributes:
        to_zero: Become zero.
        to_subnormal: Stay, with fewer bits than the format's.

    """

    to_zero: Tensor
    to_subnormal: Tensor


def underflow(values: Tensor, number_format: str | torch.dtype = "fp16", scale: Scale = 1.0) -> Underflow:
    """Compute the share of `values` that is too small for a format, exactly as a conversion would round them.

    Args:
        values: Of any shape and dtype. Zeros and non-finite values do not count; without any other, the shares are 0.
        number_format: See :func:`limits`.
        scale: What they are multiplied with before; a float, or a tensor [].

    """
    zero, subnormal, counted = underflow_counts(values, number_format, scale).unbind()
    return Underflow(zero / counted.clamp(min=1), subnormal / counted.clamp(min=1))


def underflow_counts(values: Tensor, number_format: str | torch.dtype = "fp16", scale: Scale = 1.0) -> Tensor:
    """Count the values that become zero, that become subnormal, and all that count: int64, shape [3].

    Counts of several tensors add up. The arguments are those of :func:`underflow`.
    """
    fits = limits(number_format)
    magnitude = _scaled(values, scale)
    zeros, finite = (values == 0).count_nonzero(), torch.isfinite(values).count_nonzero()
    to_zero = (magnitude <= fits.rounds_to_zero).count_nonzero()  # these include the zeros; never inf or NaN
    below_normal = (magnitude < fits.rounds_to_normal).count_nonzero()
    return torch.stack([to_zero - zeros, below_normal - to_zero, finite - zeros])


def overflow_fraction(values: Tensor, number_format: str | torch.dtype = "fp16", scale: Scale = 1.0) -> Tensor:
    """Compute the share, shape [], of values that are not finite, or would not be in the format; 0 if there are none.

    Args:
        values: Of any shape and dtype.
        number_format: See :func:`limits`.
        scale: What they are multiplied with before; a float, or a tensor [].

    """
    magnitude = _scaled(values, scale)
    fine = magnitude < limits(number_format).overflows_from  # false for NaN
    return (~fine).sum() / max(values.numel(), 1)


def headroom_bits(values: Tensor, number_format: str | torch.dtype = "fp16", scale: Scale = 1.0) -> Tensor:
    """Compute how often `values` could be doubled before the largest leaves the range, shape [].

    That is log2(largest of the format / max |values|): negative if it is outside already, infinite if all are zero or
    there are none, NaN if one is, minus infinity if one is infinite.

    Args:
        values: Of any shape and dtype.
        number_format: See :func:`limits`.
        scale: What they are multiplied with before; a float, or a tensor [].

    """
    # The logarithms apart: the quotient of a large and a tiny number leaves the range of fp32.
    factor = torch.log2(scale.to(values.device)) if isinstance(scale, Tensor) else math.log2(scale)
    return math.log2(limits(number_format).largest) - torch.log2(largest(values)) - factor


def dense(values: Tensor) -> Tensor:
    """Return the values that a sparse or nested tensor stores, as a plain one; any other as it is."""
    if values.is_nested:
        return values.values() if values.layout is torch.jagged else torch.cat([v.flatten() for v in values.unbind()])
    if values.layout is torch.sparse_coo:
        return values.coalesce().values()
    return values.values() if values.layout in _COMPRESSED else values


def outside_modes(values: Tensor) -> AbstractContextManager[None]:
    """Return a context in which no `TorchDispatchMode` sees what is measured of a plain tensor."""
    kind = type(values)
    plain = kind is Tensor or kind is nn.Parameter
    return _modules.outside_dispatch_modes() if plain else nullcontext()


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, shape [], float32: 0 if there are no values, NaN if one is."""
    values = dense(values)
    if values.numel() == 0:
        return torch.zeros((), device=values.device)
    return values.detach().abs().max().float()


def largest_finite(values: Tensor) -> Tensor:
    """Return the largest finite magnitude, shape [], float32: 0 if there are none."""
    values = dense(values)
    if values.numel() == 0:
        return torch.zeros((), device=values.device)
    with outside_modes(values):
        return values.detach().abs().nan_to_num_(0.0, 0.0).max().float()


class ExponentHistogram(NamedTuple):
    """Counts of values by exponent.

    Attributes:
        counts: int64, shape [highest - lowest + 1]; the first and the last also hold what lies beyond.
        lowest: Exponent of the first: it counts the values up to 2**(lowest + 1).
        highest: Exponent of the last: it counts the values from 2**highest on.

    """

    counts: Tensor
    lowest: int
    highest: int


def exponent_histogram(values: Tensor, lowest: int = -50, highest: int = 20) -> ExponentHistogram:
    """Count the finite non-zero values by the exponent of two that is just below them.

    Args:
        values: Of any shape and dtype.
        lowest: First bin, and what is smaller. The default lies well under what fp16 can hold at any usual scale.
        highest: Last bin, and what is larger.

    Raises:
        ValueError: If there would be no bin.

    """
    if lowest > highest:
        raise ValueError(f"`lowest` must not be above `highest`; got {lowest} and {highest}.")
    flat = values.detach().reshape(-1)
    flat = flat.abs() if flat.is_complex() else flat
    flat = flat.float() if flat.dtype != torch.float64 else flat
    size = highest - lowest + 1
    bins = torch.frexp(flat).exponent.clamp_(lowest + 1, highest + 1).sub_(lowest + 1).long()
    bins.masked_fill_((flat == 0) | ~torch.isfinite(flat), size)  # one more bin, for what does not count
    if flat.device.type == "cpu":
        counts = torch.bincount(bins, minlength=size + 1)
    else:  # where `bincount` would wait for the device to learn the largest bin
        counts = torch.zeros(size + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, bins, torch.ones_like(bins))
    return ExponentHistogram(counts[:size], lowest, highest)


def _scaled(values: Tensor, scale: Scale) -> Tensor:
    values = values.detach()
    magnitude = values.abs()
    magnitude = magnitude if magnitude.dtype in (torch.float32, torch.float64) else magnitude.float()
    return magnitude * scale
