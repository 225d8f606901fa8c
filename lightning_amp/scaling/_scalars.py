"""Flags and scalars that only the device may know, and how to read many of them with one wait."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import final


@final
class Skip:
    """Whether an optimizer step was skipped: `Skip.NO`, `Skip.YES`, or a flag that the device still computes.

    Only :meth:`wait` waits for the device. To avoid the wait, read :attr:`known`, or use :meth:`flag` on the
    device.

    """

    __slots__ = ("known", "value")
    NO: ClassVar[Skip]
    YES: ClassVar[Skip]

    def __init__(self, value: Tensor | bool) -> None:
        self.value = value
        self.known: bool | None = None if isinstance(value, Tensor) else value
        """Whether it was skipped; `None` if only the device has the result."""

    @classmethod
    def on_device(cls, flag: Tensor) -> Skip:
        """Return a skip if `flag` [] is above 0. The result is known at once if `flag` is in host memory."""
        if not in_host_memory(flag):
            return cls(flag)
        return cls.YES if host_value(flag) else cls.NO

    def wait(self) -> bool:
        """Return whether it was skipped. This waits for the device if only the device has the result."""
        return bool(self.value.item()) if isinstance(self.value, Tensor) else self.value

    def flag(self, device: torch.device) -> Tensor:
        """Return 1.0 if it was skipped, else 0.0: float32 [] on `device`. Do not write to this tensor. Never waits."""
        if isinstance(self.value, Tensor):
            return self.value.to(device, torch.float32)
        return constant(float(self.value), device)

    def __or__(self, other: Skip) -> Skip:
        if isinstance(self.value, Tensor) and isinstance(other.value, Tensor):
            return Skip(torch.maximum(self.value, other.value.to(self.value.device)))
        if self.value is False or other.value is True:
            return other
        return self


Skip.NO, Skip.YES = Skip(False), Skip(True)


def merge_losses(probe: Tensor | None, loss: Tensor) -> Tensor:
    """Return a probe [] that is finite exactly if `probe` [] and all of `loss` are.

    The first scalar loss costs nothing.
    """
    loss = loss.detach()
    if loss.dim() != 0:
        loss = (loss.float() * 0).sum()
    if probe is None:
        return loss
    return probe.float() * 0 + loss.to(probe.device).float() * 0


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
    with torch.inference_mode(False):
        return torch.full((), value, device=device, dtype=torch.float32)


def max_over_ranks(group: Any = None) -> Callable[[Tensor], Any] | None:
    """Return a function that reduces a tensor in place over the ranks of a process group; `None` for one process."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        return None
    return functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group)


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
