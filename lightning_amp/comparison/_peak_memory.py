"""The most memory that training holds at once: by the device's own count, or of tensors on the CPU."""

from __future__ import annotations

import contextlib
import gc
from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import final, override

from lightning_amp._compat import _torch

_SETTLED_STEPS = 3
"""Optimizer steps that are watched on the CPU: from the second on gradients and optimizer state are all there."""
_MOST_STEPS = 64
"""So many are enough where none of them is applied."""


def is_settled(trainer: Trainer, num_batches: int, steps_before: int = 0) -> bool:
    """Return whether memory has been at its peak: gradients, optimizer state and activations were there together.

    A step that was skipped makes no state, and several optimizers may step in one batch.

    Args:
        trainer: In a fit, after a batch.
        num_batches: How many were trained.
        steps_before: What `trainer.global_step` was before the first.

    """
    attempted = trainer.global_step - steps_before
    applied = attempted - getattr(trainer.precision_plugin, "num_skipped", 0)
    return num_batches >= _SETTLED_STEPS and (applied >= _SETTLED_STEPS or attempted >= _MOST_STEPS)


class PeakMemory:
    """Watches training, not validation, where :class:`MetricComparison` holds a copy of the module."""

    memory_of: str

    @staticmethod
    def on(device: torch.device, module: nn.Module, *, profiled: bool = False) -> PeakMemory:
        """Return what watches this device, before its first training step.

        Args:
            device: Where training runs.
            module: What is trained.
            profiled: Whether the user's own torch profiler is going to watch: of two, the second one fails.

        """
        return TensorPeak(module, profiled=profiled) if device.type == "cpu" else DevicePeak(device)

    @abstractmethod
    def resume(self) -> None:
        """Go on after a pause."""

    @abstractmethod
    def pause(self) -> None:
        """Look away: what follows is no training."""

    @abstractmethod
    def close(self) -> int | None:
        """Return the peak in bytes; `None` if it could not be measured."""


@final
class DevicePeak(PeakMemory):
    """The peak that the device's allocator counts (`max_memory_allocated`); `None` where it does not, as on MPS."""

    memory_of = "device"

    def __init__(self, device: torch.device) -> None:
        self._where = device
        self._backend: Any = torch.get_device_module(device.type)
        self._counts = hasattr(self._backend, "max_memory_allocated")
        self._peak = 0
        self._watching = False

    @override
    def resume(self) -> None:
        if self._counts:
            self._backend.reset_peak_memory_stats(self._where)
        self._watching = self._counts

    @override
    def pause(self) -> None:
        if self._watching:
            self._peak = max(self._peak, self._backend.max_memory_allocated(self._where))
        self._watching = False

    @override
    def close(self) -> int | None:
        self.pause()
        return self._peak or None


@final
class TensorPeak(PeakMemory):
    """What tensors hold on the CPU: weights and buffers, and what the CPU allocator of torch gives out beside them.

    By torch's profiler, which changes no value; memory that others take (data loading, Python) is not in it. Stopped
    after some steps, since a profile grows with each. `None` if another profiler is at work.
    """

    memory_of = "tensors"

    def __init__(self, module: nn.Module, *, profiled: bool = False) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        made = [t.untyped_storage() for t in tensors if not (t.is_meta or is_lazy(t))]
        storages = {storage.data_ptr(): storage.nbytes() for storage in made}
        self._held = sum(storages.values())
        self._profile: Any = None
        self._peak: int | None = None
        self._started = profiled

    @override
    def resume(self) -> None:
        if self._started:
            return
        self._started = True
        if _torch.is_profiling():
            return
        gc.collect()  # what an earlier profile saw allocated, and is freed in this one, would count against it
        with contextlib.suppress(Exception):
            profile: Any = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            profile.__enter__()
            self._profile = profile

    @override
    def pause(self) -> None:
        """Do nothing: what is watched are the first steps, before any validation."""

    @override
    def close(self) -> int | None:
        profile, self._profile = self._profile, None
        if profile is not None and _torch.is_profiling():  # else somebody's own profiler ended this one
            with contextlib.suppress(Exception):
                profile.__exit__(None, None, None)
                self._peak = self._held + _torch.peak_of_allocations(profile)
        return self._peak
