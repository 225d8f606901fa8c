"""Number formats: their limits, and the loss scale that fits into fp16."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from typing_extensions import final

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that autocast computes in."""


@final
@dataclass(frozen=True, slots=True)
class FormatLimits:
    """The limits of a floating-point format.

    Attributes:
        name: `"fp32"`, `"bf16"`, `"fp16"`, `"e4m3"` or `"e5m2"`.
        dtype: The torch dtype of the format.
        largest: The largest finite value.
        rounds_to_zero: Values up to this one become zero (round to nearest, ties to even).
        rounds_to_normal: Values from this one on become normal numbers; smaller values lose one bit of precision with
            each halving.
        overflows_from: Values from this one on overflow. They become infinite, or in e4m3, which has no infinity, torch
            2.13 cuts them to the largest value; other libraries return NaN.

    """

    name: str
    dtype: torch.dtype
    largest: float
    rounds_to_zero: float
    rounds_to_normal: float
    overflows_from: float


def _measure(name: str, dtype: torch.dtype) -> FormatLimits:
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    top_step = 2.0 ** (math.frexp(info.max)[1] - 1) * info.eps
    half_way = info.max + top_step / 2
    if name == "e4m3":  # its largest value is even, so the tie rounds down to it; in all other formats it is odd
        half_way = float(torch.nextafter(torch.tensor(half_way), torch.tensor(torch.inf)))
    return FormatLimits(name, dtype, info.max, subnormal / 2, info.smallest_normal - subnormal / 2, half_way)


FORMATS: dict[str, FormatLimits] = {
    name: _measure(name, dtype)
    for name, dtype in {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }.items()
}
"""The formats by name."""


@functools.cache
def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that does not compute in float64: MPS, some XPUs and NPUs."""
    try:
        torch.ones((), device=device, dtype=torch.float64).reciprocal()
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def fitting_scale(largest: float, spare_bits: float = 2.0, lowest: int = -14) -> float:
    """Return the largest power of two, from 2**lowest to 2**24, that keeps `largest` inside fp16.

    `largest` is the magnitude of the largest true gradient, and `spare_bits` leaves room for batches with larger ones.
    """
    if not largest > 0:
        return 2.0**24
    exponent = math.floor(math.log2(FORMATS["fp16"].largest) - math.log2(largest) - spare_bits)
    return 2.0 ** min(max(exponent, lowest), 24)
