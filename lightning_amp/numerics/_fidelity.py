"""How close values come to what they should be. Every result is a tensor on the device: nothing waits for it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_amp.numerics._limits import widest_dtype


def sqnr_db(reference: Tensor, values: Tensor) -> Tensor:
    """Compute the signal-to-quantization-noise ratio in decibels, shape [].

    That is 20 log10(||reference|| / ||values - reference||), the usual measure of low-precision arithmetic: 6.02 dB are
    one correct bit. Infinite if both are equal (two zero or two empty tensors, too); minus infinity if only the
    reference is zero; NaN if a value is not finite.

    Args:
        reference: What the values should be.
        values: Of the same shape; any dtype.

    Raises:
        ValueError: If the shapes differ.

    """
    return fidelity(fidelity_sums(reference, values))[0]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Compute the cosine of the angle between two tensors, shape []: 1 if they point the same way.

    1 if both are zero (or empty), 0 if only one is, NaN if a value is not finite.

    Args:
        a: Any shape and dtype. A complex value counts as its two parts.
        b: The same shape.

    Raises:
        ValueError: If the shapes differ.

    """
    return fidelity(fidelity_sums(a, b))[1]


def fidelity_sums(reference: Tensor, values: Tensor) -> Tensor:
    """Sum the squares of `reference`, of `values` and of their difference, float64, shape [3].

    Those of several tensors add up; :func:`fidelity` turns them into a ratio. (float32 on devices without float64.)

    Raises:
        ValueError: If the shapes differ.

    """
    if reference.shape != values.shape:
        raise ValueError(f"The shapes must be the same; got {tuple(reference.shape)} and {tuple(values.shape)}.")
    # In float64 the squares of the smallest fp32 gradients do not underflow.
    dtype = widest_dtype(reference.device)
    reference, values = _at_least_fp32(reference.detach()), _at_least_fp32(values.detach())
    norms = [torch.linalg.vector_norm(t, dtype=dtype) for t in (reference, values, values - reference)]
    return torch.stack(norms).square()


def inner_product(reference: Tensor, values: Tensor) -> Tensor:
    """Sum the products of two tensors of one shape, float64, shape [].

    Those of several tensors add up. For a cosine between tensors of very different length, of which the sums of
    squares know nothing.
    """
    a, b = _at_least_fp32(reference.detach()).reshape(-1), _at_least_fp32(values.detach()).reshape(-1)
    if not a.numel():
        return fidelity_sums(a, b).sum()
    # each by its largest: the products of small gradients leave the range of fp32
    tops = [torch.where(top > 0, top, torch.ones_like(top)) for top in (a.abs().max(), b.abs().max())]
    dtype = widest_dtype(a.device)
    product = torch.dot(a / tops[0], (b / tops[1]).to(a.dtype)).to(dtype)
    return product * tops[0].to(dtype) * tops[1].to(dtype)


def fidelity(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Turn :func:`fidelity_sums` into SQNR in decibels and cosine, each of shape []."""
    signal, energy, noise = sums.unbind()
    finite = torch.isfinite(sums).all()
    decibels = 10 * (torch.log10(signal) - torch.log10(noise))
    decibels = torch.where(noise == 0, torch.full_like(noise, torch.inf), decibels)
    lengths = signal.sqrt() * energy.sqrt()
    # The dot product from the three sums: no second pass over the values.
    quotient = (signal + energy - noise) / 2 / torch.where(lengths == 0, torch.ones_like(lengths), lengths)
    quotient = torch.where(lengths == 0, ((signal == 0) & (energy == 0)).to(quotient.dtype), quotient.clamp(-1, 1))
    unknown = torch.full_like(decibels, torch.nan)
    return torch.where(finite, decibels, unknown), torch.where(finite, quotient, unknown)


def _at_least_fp32(values: Tensor) -> Tensor:
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


_MASK = -3e4
"""What is below in both is a mask: each precision has its own smallest number."""


@torch.no_grad()
def output_sums(reference: Tensor, values: Tensor) -> Tensor:
    """Compare two outputs: sums of squares, float64 [6].

    Three as of :func:`fidelity_sums`, and three of what differs between the samples, that is
    after subtraction of the mean over the first dimension: in `x + 1000` little of the whole is wrong in bfloat16, and
    most of what matters.
    """
    reference, values = reference.detach().float(), values.detach().float()
    alike = ((reference < _MASK) & (values < _MASK)) | (reference == values) & ~torch.isfinite(reference)
    alike |= torch.isnan(reference) & torch.isnan(values)
    reference, values = reference.masked_fill(alike, 0.0), values.masked_fill(alike, 0.0)
    plain = fidelity_sums(reference, values)
    if reference.ndim == 0 or reference.shape[0] < 2:
        return torch.cat([plain, plain])
    error = values - reference
    varying = reference - reference.mean(0, keepdim=True)
    return torch.cat([plain, fidelity_sums(varying, varying + (error - error.mean(0, keepdim=True)))])
