"""Half-precision tensors in whatever container, as float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_amp._containers import replace
from lightning_amp.numerics import HALF_DTYPES


def to_fp32(data: Any) -> Any:
    """Turn float16 and bfloat16 tensors into float32; everything else, and what holds none, is left alone."""
    return replace(data, _to_fp32)


def _to_fp32(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value
