"""The peak memory of training."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp.measure import PeakMemory, is_settled, num_bytes

MIB, CPU = 2**20, torch.device("cpu")


def test_weights_and_all_allocations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    watch = PeakMemory(CPU, nn.Linear(1024, 1024, bias=False))  # 4 MiB
    watch.resume()
    assert "KINETO_LOG_LEVEL" not in os.environ
    two = torch.ones(2, MIB)  # 8 MiB, dropped before the next 4
    del two
    kept = torch.ones(MIB)
    watch.pause()
    watch.resume()
    assert watch.close() == pytest.approx(12 * MIB, rel=0.01)
    del kept
    assert watch.close() == pytest.approx(12 * MIB, rel=0.01)


def test_shared_weights_count_once() -> None:
    module = nn.ModuleDict({"a": nn.Linear(512, 512, bias=False)})
    module["b"] = nn.Linear(512, 512, bias=False)
    module["b"].weight = module["a"].weight
    watch = PeakMemory(CPU, module)
    watch.resume()
    assert watch.close() == pytest.approx(MIB, rel=0.01)


def test_garbage_from_before_is_collected_before_watching() -> None:
    """If garbage that the profiler saw allocated earlier were freed now, it would be subtracted from this peak."""
    earlier, watch = PeakMemory(CPU, nn.Linear(2, 2)), PeakMemory(CPU, nn.Linear(2, 2))
    gc.disable()  # otherwise the collector may run on its own before
    try:
        earlier.resume()
        garbage: list[Any] = [torch.ones(4 * MIB)]
        earlier.close()
        garbage.append(garbage)  # only the collector finds it
        del garbage
        watch.resume()
        gc.collect()
    finally:
        gc.enable()
    kept = torch.ones(MIB)
    assert watch.close() == pytest.approx(4 * MIB, rel=0.01)
    del kept


def test_nothing_is_measured_while_another_profiler_runs() -> None:
    watch = PeakMemory(CPU, nn.Linear(2, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        watch.resume()
        torch.ones(3)
        assert watch.close() is None
    assert other.events()


class Backend:
    """Stand in for `torch.cuda`."""

    peak = 0

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device) -> None:
        cls.peak = 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device) -> int:
        return cls.peak


def test_a_device_counts_itself_and_validation_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Backend)
    watch = PeakMemory(torch.device("cuda"), nn.Linear(2, 2))
    assert watch.memory_of == "device"
    watch.resume()
    Backend.peak = 100
    watch.pause()
    Backend.peak = 900  # the copy of `MetricComparison`
    watch.resume()
    Backend.peak = 150
    assert watch.close() == 150


def test_a_device_that_does_not_count_is_not_measured() -> None:
    """Tensors of the CPU would leave out the memory of the device."""
    watch = PeakMemory(torch.device("mps"), nn.Linear(2, 2))
    watch.resume()
    watch.pause()
    assert watch.close() is None


@pytest.mark.parametrize(
    ("steps", "skipped", "batches", "expected"),
    [
        (3, 0, 3, True),
        (2, 0, 8, False),  # accumulation: a window of four
        (4, 0, 2, False),  # two optimizers in each batch
        (3, 0, 12, True),
        (5, 3, 5, False),  # skipped steps make no optimizer state
        (6, 3, 6, True),
        (64, 64, 64, True),
    ],
)
def test_how_many_steps_are_watched(steps: int, skipped: int, batches: int, expected: bool) -> None:
    assert is_settled(batches, steps, skipped) is expected


def test_a_storage_that_is_shared_counts_once() -> None:
    tensor = torch.zeros(10)
    assert num_bytes([tensor, tensor[:5], torch.zeros(1), torch.zeros(9, device="meta")]) == 44
