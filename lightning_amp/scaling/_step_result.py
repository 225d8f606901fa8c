"""What became of one optimizer step, as far as the device knows it; `StepRecord` is what the host reads from that.

The flag of a step (:class:`Skip`), the witness of its losses, and the one record that carries both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp.findings import StepPrecision, StepReason, StepRecord
from lightning_amp.numerics import nonfinite


@final
class Skip:
    """Whether something was skipped: `Skip.NO`, `Skip.YES`, or a flag that the device still computes. Immutable.

    Only :meth:`wait` waits for the device. Whoever can do without asks :attr:`known`, or hands :meth:`flag` on.

    """

    __slots__ = ("known", "value")
    NO: ClassVar[Skip]
    YES: ClassVar[Skip]

    def __init__(self, value: Tensor | bool) -> None:
        self.value = value
        self.known: bool | None = None if isinstance(value, Tensor) else value
        """Whether it was skipped; `None` if only the device knows."""

    @classmethod
    def on_device(cls, flag: Tensor) -> Skip:
        """Return the skip that `flag` [] tells of (above 0: yes), known at once where it is in host memory."""
        if not in_host_memory(flag):
            return cls(flag)
        return cls.YES if host_value(flag) else cls.NO

    @classmethod
    def if_nonfinite(cls, probe: Tensor | None) -> Skip:
        """Return the skip that a value [] asks for: yes if it is inf or NaN; `None` asks for none."""
        if probe is None:
            return cls.NO
        if not in_host_memory(probe):
            return cls(nonfinite(probe))
        return cls.NO if math.isfinite(host_value(probe)) else cls.YES

    @classmethod
    def wait_together(cls, flag: Tensor, other: Tensor) -> tuple[Skip, Skip]:
        """Wait for two flags [] of 0.0 or 1.0 on one device with a single transfer."""
        both = (flag * 2 + other).item()
        return cls.YES if both >= 2 else cls.NO, cls.YES if both % 2 else cls.NO

    def wait(self) -> bool:
        """Return whether it was skipped. Waits for the device if need be."""
        return bool(self.value.item()) if isinstance(self.value, Tensor) else self.value

    def flag(self, device: torch.device) -> Tensor:
        """Return 1.0 if it was skipped, else 0.0, float32, [], on `device`. Never waits; not to be written into."""
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


@final
@dataclass(slots=True, eq=False)
class StepResult:
    """What became of one step, before the host has read it. It becomes a :class:`StepRecord`.

    Attributes:
        skip: Whether it was skipped.
        loss_probe: Finite exactly if the losses of this step were, []; `None` if nobody backpropagated one.
        optimizer_idx: Which optimizer.
        scale: Loss scale used, []; `None` without scaling.
        overflow: Whether the scale was too large. A step whose overflow the user mended was taken all the same.
        had_gradients: On any rank. A step without gradients says nothing about the scale.
        known_bad_loss: Whether the loss was not finite, where the host has read it with `skip`.
        reported_bad_loss: The same, where somebody listens for steps that were taken with such a loss.
        next_scale: Loss scale that follows, []; set once, when it is known.

    """

    skip: Skip
    loss_probe: Tensor | None = None
    optimizer_idx: int = 0
    scale: Tensor | None = None
    overflow: Skip = Skip.NO
    had_gradients: bool = True
    known_bad_loss: Skip | None = None
    reported_bad_loss: Skip = Skip.NO
    next_scale: Tensor | None = None

    @property
    def bad_loss(self) -> Skip:
        """Return whether the loss was not finite, which asks for a skip whatever its gradients were mended to."""
        return self.known_bad_loss or Skip.if_nonfinite(self.loss_probe)

    def report_loss(self) -> None:
        """Have it read, with the skip, whether the loss was not finite."""
        self.reported_bad_loss = self.bad_loss

    def note(self, skip: bool, bad_loss: bool) -> None:
        """Note what the host has read of both."""
        self.skip = Skip.YES if skip else Skip.NO
        self.reported_bad_loss = Skip.YES if bad_loss else Skip.NO

    def complete(self, next_scale: Tensor | None) -> None:
        """Note the scale that follows, []."""
        self.next_scale = next_scale

    def gradient_overflow(self, device: torch.device) -> Tensor:
        """Return 1.0 if gradients overflowed under a finite loss, else 0.0, [], on `device`."""
        flag = self.overflow.flag(device)
        if self.loss_probe is None:
            return flag
        return flag * (1 - held_by(self.loss_probe, flag).to(torch.float32))


def merge_losses(probe: Tensor | None, loss: Tensor) -> Tensor:
    """Return a probe [] that is finite exactly if `probe` [] and all of `loss` are; the first loss costs nothing."""
    loss = loss.detach()
    if loss.dim() != 0:
        loss = (loss.float() * 0).sum()
    if probe is None:
        return loss
    return probe.float() * 0 + loss.to(probe.device).float() * 0


def held_by(probe: Tensor, found_inf: Tensor) -> Tensor:
    """Return whether an overflow, `found_inf` [], is that of the loss, so that the scale stays; bool, [], beside it."""
    return nonfinite(probe).to(found_inf.device).logical_and(found_inf)


def read_records(
    steps: Sequence[StepResult], skips: Sequence[float], first_index: int, precision: StepPrecision
) -> list[StepRecord]:
    """Read the scales of steps, and the losses of those that were skipped, with one transfer per device."""
    probes = [step.loss_probe if skip else None for step, skip in zip(steps, skips, strict=True)]
    values = read_scalars([*(scale for step in steps for scale in (step.scale, step.next_scale)), *probes])
    used, following, losses = values[: 2 * len(steps) : 2], values[1 : 2 * len(steps) : 2], values[2 * len(steps) :]
    reasons: list[StepReason] = [
        "none" if not skip else "gradient" if math.isfinite(loss) else "loss"
        for skip, loss in zip(skips, losses, strict=True)
    ]
    return [
        StepRecord(first_index + i, step.optimizer_idx, used[i], following[i], bool(skips[i]), reasons[i], precision)
        for i, step in enumerate(steps)
    ]


# -- scalars on the device ---------------------------------------------------------------------------------------------


def in_host_memory(scalar: Tensor) -> bool:
    """Return whether reading it is free, since no device has to be waited for."""
    return scalar.device.type == "cpu"


def host_value(scalar: Tensor) -> float:
    """Return the value of a scalar in host memory; not by `item`, which is what waiting looks like to a profiler."""
    value: Any = scalar.tolist()
    return value


@functools.cache
def constant(value: float, device: torch.device) -> Tensor:
    """Return a float32 scalar [] that is made once; nobody writes into it."""
    return torch.full((), value, device=device, dtype=torch.float32)


def read_scalars(values: Sequence[Tensor | bool | None]) -> list[float]:
    """Bring scalars to the host with one transfer per device; `None` reads as 1.0 (no scaling)."""
    out = [1.0 if v is None else float(v) if isinstance(v, bool) else 0.0 for v in values]
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for v in values:
        if isinstance(v, Tensor):
            by_device.setdefault(v.device, {})[id(v)] = v
    read: dict[int, float] = {}
    for unique in by_device.values():
        tensors = [t if t.dtype == torch.float32 and t.dim() == 0 else t.reshape(()).float() for t in unique.values()]
        read.update(zip(unique, torch.stack(tensors).tolist(), strict=True))
    return [read[id(v)] if isinstance(v, Tensor) else o for v, o in zip(values, out, strict=True)]
