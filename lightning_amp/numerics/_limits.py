"""The limits of fp16, and the loss scale that fits into it."""

from __future__ import annotations

import functools
import math

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that autocast computes in."""


FP16_LARGEST = 65504.0
FP16_ROUNDS_TO_ZERO = 2.0**-25
"""Values up to this one become zero in fp16 (round to nearest, ties to even)."""
FP16_ROUNDS_TO_NORMAL = 2.0**-14 - 2.0**-25
"""Values from this one on become normal numbers in fp16; smaller values lose one bit of precision with each halving."""


@functools.cache
def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that does not compute in float64: MPS, some XPUs and NPUs."""
    try:
        torch.ones((), device=device, dtype=torch.float64).reciprocal()
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def fitting_scale(largest: float, spare_bits: float = 2.0, lowest: int = -14, highest: int = 24) -> float:
    """Return the largest power of two, from 2**lowest to 2**highest, that keeps `largest` inside fp16.

    `largest` is the magnitude of the largest true gradient, and `spare_bits` leaves room for batches with larger ones.
    """
    if not largest > 0:
        return 2.0**highest
    exponent = math.floor(math.log2(FP16_LARGEST) - math.log2(largest) - spare_bits)
    return 2.0 ** min(max(exponent, lowest), highest)
