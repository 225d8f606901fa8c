"""Read scalars from the device, and create scalars on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def in_host_memory(scalar: Tensor) -> bool:
    """Return whether the host can read a scalar without waiting for a device."""
    return scalar.device.type == "cpu"


def host_value(scalar: Tensor) -> float:
    """Return the value of a scalar in host memory. Profilers count each `item` as a wait, so this uses `tolist`."""
    value: Any = scalar.tolist()
    return value


@functools.cache
def constant(value: float, device: torch.device) -> Tensor:
    """Return a float32 scalar [] that all callers share. Do not write to it."""
    return torch.full((), value, device=device, dtype=torch.float32)


def read_scalars(values: Sequence[Tensor | bool | None]) -> list[float]:
    """Bring scalars to the host with one transfer per device; `None` reads as 1.0 (no scaling)."""
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for v in values:
        if isinstance(v, Tensor):
            by_device.setdefault(v.device, {})[id(v)] = v
    read: dict[int, float] = {}
    for unique in by_device.values():
        tensors = [t if t.dtype == torch.float32 and t.dim() == 0 else t.reshape(()).float() for t in unique.values()]
        read.update(zip(unique, torch.stack(tensors).tolist(), strict=True))
    return [read[id(v)] if isinstance(v, Tensor) else 1.0 if v is None else float(v) for v in values]
