"""Measure how close values are to a reference.

Every result is a tensor on the device, so no function waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_amp.numerics._limits import widest_dtype
from lightning_amp.numerics._ranges import dense

_MASK, _HALF_MASK = -1e8, -3e4
"""A value counts as a mask if it is below the first limit in the reference and below the second in the other output.

Each precision fills masks with its own smallest number. An overflow to minus infinity is no mask.
"""


def fidelity(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Turn :func:`fidelity_sums` into SQNR in decibels and cosine, each of shape []. NaN if a value is not finite.

    The SQNR is 20 log10(||reference|| / ||values - reference||), the usual measure of low-precision arithmetic: 6.02 dB
    are one correct bit. It is infinite if both tensors are equal (zero or empty ones, too), and minus infinity if only
    the reference is zero. The cosine is 1 if both are zero, and 0 if only one is.
    """
    signal, energy, noise = sums.unbind()
    finite = torch.isfinite(sums).all()
    decibels = 10 * (torch.log10(signal) - torch.log10(noise))
    decibels = torch.where(noise == 0, torch.full_like(noise, torch.inf), decibels)
    lengths = signal.sqrt() * energy.sqrt()
    # The three sums give the dot product without a second pass over the values.
    quotient = (signal + energy - noise) / 2 / torch.where(lengths == 0, torch.ones_like(lengths), lengths)
    quotient = torch.where(lengths == 0, ((signal == 0) & (energy == 0)).to(quotient.dtype), quotient.clamp(-1, 1))
    unknown = torch.full_like(decibels, torch.nan)
    return torch.where(finite, decibels, unknown), torch.where(finite, quotient, unknown)


def fidelity_sums(reference: Tensor, values: Tensor) -> Tensor:
    """Return the squared norms of `reference`, of `values` and of their difference: [3], float64 if the device has it.

    The sums of several tensors may be added up; :func:`fidelity` turns them into ratios. A complex value counts as two
    real values.
    """
    if reference.shape != values.shape:
        raise ValueError(f"The shapes must be the same; got {tuple(reference.shape)} and {tuple(values.shape)}.")
    # In float64 the squares of the smallest fp32 gradients do not underflow.
    dtype = widest_dtype(reference.device)
    reference, values = _at_least_fp32(reference.detach()), _at_least_fp32(values.detach())
    norms = [torch.linalg.vector_norm(t, dtype=dtype) for t in (reference, values, values - reference)]
    return torch.stack(norms).square()


def inner_product(reference: Tensor, values: Tensor) -> Tensor:
    """Return the inner product of two tensors of one shape: [], float64 if the device has it.

    The products of several tensors add up. Use it for the cosine between tensors whose norms differ by orders of
    magnitude, where the sums of squares lose it.
    """
    a, b = _at_least_fp32(reference.detach()).reshape(-1), _at_least_fp32(values.detach()).reshape(-1)
    if not a.numel():
        return fidelity_sums(a, b).sum()
    # Divide each by its largest value first, since products of small gradients leave the range of fp32.
    tops = [torch.where(top > 0, top, torch.ones_like(top)) for top in (a.abs().max(), b.abs().max())]
    dtype = widest_dtype(a.device)
    product = torch.dot(a / tops[0], (b / tops[1]).to(a.dtype)).to(dtype)
    return product * tops[0].to(dtype) * tops[1].to(dtype)


@torch.no_grad()
def output_sums(reference: Tensor, values: Tensor) -> Tensor:
    """Compare two outputs: [6], float64 if the device has it.

    The first three are :func:`fidelity_sums` of the outputs. The last three are the same after subtracting the mean
    over the first dimension. They show the bfloat16 error in `x + 1000`, which is a small part of the whole output but
    a large part of the difference between samples.
    """
    reference, values = dense(reference).detach().float(), dense(values).detach().float()
    alike = ((reference < _MASK) & (values < _HALF_MASK)) | (reference == values) & ~torch.isfinite(reference)
    alike |= torch.isnan(reference) & torch.isnan(values)
    reference, values = reference.masked_fill(alike, 0.0), values.masked_fill(alike, 0.0)
    plain = fidelity_sums(reference, values)
    if reference.ndim == 0 or reference.shape[0] < 2:
        return torch.cat([plain, plain])
    error = values - reference
    varying = reference - reference.mean(0, keepdim=True)
    return torch.cat([plain, fidelity_sums(varying, varying + (error - error.mean(0, keepdim=True)))])


def _at_least_fp32(values: Tensor) -> Tensor:
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
