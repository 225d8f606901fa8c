"""The bytes of tensors, and the most that training holds at once: by the device's count, or of tensors on the CPU."""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import final, override

from lightning_amp._compat import _torch

_SETTLED_STEPS = 3
"""Optimizer steps that are watched on the CPU: from the second on gradients and optimizer state are all there."""
_MOST_STEPS = 64
"""So many are enough where none of them is applied."""


def is_settled(num_batches: int, num_attempted: int, num_skipped: int) -> bool:
    """Return whether memory has been at its peak: gradients, optimizer state and activations were there together.

    A step that was skipped makes no state, and several optimizers may step in one batch.
    """
    applied = num_attempted - num_skipped
    return num_batches >= _SETTLED_STEPS and (applied >= _SETTLED_STEPS or num_attempted >= _MOST_STEPS)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors; a storage that is shared counts once."""
    storages: dict[int, int] = {}
    for tensor in (inner for outer in tensors for inner in _inner(outer)):
        if has_storage(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has one block of memory: it is not lazy, sparse or on the meta device."""
    return not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta


def _inner(tensor: Tensor) -> Iterable[Tensor]:
    """Return the tensors that hold the values: of one that is quantized there are several."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return (tensor,)
    flat: Any = tensor
    return [inner for name in flat.__tensor_flatten__()[0] for inner in _inner(getattr(flat, name))]


class PeakMemory(ABC):
    """Watches training, not validation, where :class:`MetricComparison` holds a copy of the module."""

    memory_of: str

    @staticmethod
    def on(device: torch.device, module: nn.Module, *, profiled: bool = False) -> PeakMemory:
        """Return what watches this device, before its first training step.

        `profiled` says whether the user's own torch profiler is going to watch: of two, the second one fails.

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
        self._held = num_bytes([*module.parameters(), *module.buffers()])
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
