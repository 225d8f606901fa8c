"""Count the bytes of tensors, and measure the peak memory of training on a device or on the CPU."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import final

from lightning_amp._compat import _sharding

MemoryOf = Literal["device", "tensors"]
"""The source of a peak: the memory handed out by the device's allocator, or the memory of tensors on the CPU."""

_SETTLED_STEPS = 3
"""Number of optimizer steps to watch on the CPU. From the second step on, all gradients and optimizer states exist."""
_MOST_STEPS = 64
"""The number of steps to watch if all of them are skipped."""


def is_settled(num_batches: int, num_attempted: int, num_skipped: int) -> bool:
    """Return whether memory has reached its peak, because gradients, optimizer states and activations existed together.

    A skipped step makes no optimizer state, and several optimizers may step in one batch.
    """
    applied = num_attempted - num_skipped
    return num_batches >= _SETTLED_STEPS and (applied >= _SETTLED_STEPS or num_attempted >= _MOST_STEPS)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes in the storages of tensors; a shared storage counts once."""
    storages: dict[int, int] = {}
    for tensor in (inner for outer in tensors for inner in inner_tensors(outer)):
        # lazy, sparse and meta tensors have no single block of memory
        if not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def inner_tensors(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors that hold the values: of a sharded tensor this rank's part, of a quantized one several."""
    tensor = _sharding.local(tensor)
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return (tensor,)
    flat: Any = tensor
    return [inner for name in flat.__tensor_flatten__()[0] for inner in inner_tensors(getattr(flat, name))]


@final
class PeakMemory:
    """Measure the peak of training, without validation, where :class:`MetricComparison` holds a copy of the module.

    On a device it reads the allocator (`max_memory_allocated`). MPS has none, so its peak is `None`. On the CPU it
    counts weights, buffers, and all other memory from torch's CPU allocator, by torch's profiler, which changes no
    value. Memory of data loading and of Python does not count. The caller closes it after some steps, because a profile
    grows with each step. The peak is `None` if another profiler is running.

    Make it before the first training step. `profiled` is whether the user's own torch profiler will run: torch cannot
    run two profilers at once.
    """

    def __init__(self, device: torch.device, module: nn.Module, *, profiled: bool = False) -> None:
        self.memory_of: MemoryOf = "tensors" if device.type == "cpu" else "device"
        self._where = device
        self._peak: int | None = None
        self._backend: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._held = num_bytes([*module.parameters(), *module.buffers()])
        self._profile: Any = None
        self._is_counting, self._has_begun = False, profiled

    def resume(self) -> None:
        """Begin, or continue after a pause; on the CPU only the first steps are measured, before any validation."""
        if self._backend is not None:
            self._is_counting = hasattr(self._backend, "max_memory_allocated")
            if self._is_counting:
                self._backend.reset_peak_memory_stats(self._where)
        elif not self._has_begun and not _is_profiling():
            gc.collect()  # otherwise memory from an earlier profile that is freed in this profile would be subtracted
            level = os.environ.get("KINETO_LOG_LEVEL")
            os.environ["KINETO_LOG_LEVEL"] = level or "6"  # otherwise the profiler prints its start and its end
            with contextlib.suppress(Exception):
                self._profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True).__enter__()
            if level is None:
                del os.environ["KINETO_LOG_LEVEL"]
        self._has_begun = True

    def pause(self) -> None:
        """Stop counting until :meth:`resume`."""
        if self._is_counting:
            self._peak = max(self._peak or 0, self._backend.max_memory_allocated(self._where))
        self._is_counting = False

    def close(self) -> int | None:
        """Return the peak in bytes; `None` if it could not be measured."""
        self.pause()
        profile, self._profile = self._profile, None
        if profile is not None and _is_profiling():  # otherwise another profiler has already ended this profiler
            with contextlib.suppress(Exception):
                profile.__exit__(None, None, None)
                self._peak = self._held + _peak_of_allocations(profile)
        return self._peak


# Remove when a profile has a public list of allocations; `export_memory_timeline` is deprecated and writes a file.
def _peak_of_allocations(profile: Any) -> int:
    """Return the most bytes that were allocated on the CPU at once in a profile with `profile_memory=True`."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    cpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    held = peak = 0
    for event in sorted(cpu, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# Remove when there is a public check.
def _is_profiling() -> bool:
    """Return whether a torch profiler is running in this thread. Starting a second one would end it."""
    return bool(torch.autograd._profiler_enabled())
