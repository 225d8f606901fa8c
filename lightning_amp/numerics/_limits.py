"""Number formats: what they can hold, and the loss scale that fits into one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from typing_extensions import final

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""What autocast computes in."""


@final
@dataclass(frozen=True, slots=True)
class FormatLimits:
    """The limits of a floating-point format.

    Attributes:
        name: `"fp32"`, `"bf16"`, `"fp16"`, `"e4m3"` or `"e5m2"`.
        dtype: Torch's name for it.
        largest: The largest finite value.
        smallest_normal: Below it, precision is lost bit by bit.
        smallest_subnormal: The smallest value above zero.
        epsilon: From 1 to the next value.
        rounds_to_zero: Values up to here become zero (round to nearest, ties to even).
        rounds_to_normal: Values from here on become normal.
        overflows_from: Values from here on are outside: they become infinite, or in e4m3, which has no infinity, are
            cut to the largest value (by torch 2.13) or become NaN (in other libraries).

    """

    name: str
    dtype: torch.dtype
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    rounds_to_zero: float
    rounds_to_normal: float
    overflows_from: float


def _measure(name: str, dtype: torch.dtype) -> FormatLimits:
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    top_step = 2.0 ** (_exponent(info.max)) * info.eps
    half_way = info.max + top_step / 2
    # In e4m3 the largest value is even, so that the tie rounds down to it; everywhere else it is odd.
    tie_stays = name == "e4m3"
    return FormatLimits(
        name=name,
        dtype=dtype,
        largest=info.max,
        smallest_normal=info.smallest_normal,
        smallest_subnormal=subnormal,
        epsilon=info.eps,
        rounds_to_zero=subnormal / 2,
        rounds_to_normal=info.smallest_normal - subnormal / 2,
        overflows_from=_next_float32(half_way) if tie_stays else half_way,
    )


@functools.cache
def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that does not compute in float64: MPS, some XPUs and NPUs."""
    try:
        torch.ones((), device=device, dtype=torch.float64).reciprocal()
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def _exponent(value: float) -> int:
    mantissa, exponent = torch.frexp(torch.tensor(value, dtype=torch.float64))
    assert 0.5 <= mantissa < 1
    return int(exponent) - 1


def _next_float32(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(float("inf"))))


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


def limits(number_format: str | torch.dtype) -> FormatLimits:
    """Look up the limits of a format, by its name or its dtype.

    Raises:
        ValueError: For any other, with the ones that are known.

    """
    for known in FORMATS.values():
        if number_format in (known.name, known.dtype):
            return known
    raise ValueError(f"`number_format` must be one of {list(FORMATS)} or their dtypes; got {number_format!r}.")


def fitting_scale(largest: float, spare_bits: float = 2.0, lowest: int = -14) -> float:
    """Return the largest power of two that keeps `largest` inside fp16, with some bits to spare.

    Args:
        largest: Magnitude of the largest true gradient.
        spare_bits: For batches with larger ones.
        lowest: Exponent of the lowest scale to return. The highest is that of `DynamicLossScaler`, 2**24.

    """
    if not largest > 0:
        return 2.0**24
    exponent = math.floor(math.log2(limits("fp16").largest) - math.log2(largest) - spare_bits)
    return 2.0 ** min(max(exponent, lowest), 24)
