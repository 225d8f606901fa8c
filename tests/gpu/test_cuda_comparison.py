"""`compare_precisions` on a GPU: the device's own peak memory, timing without waits, and the TF32 setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.compared import Sea, Waves, by_hand, here, spec

from lightning_amp import AmpPrecision, compare_precisions
from lightning_amp.measure import StepTimer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA: dict[str, Any] = {"accelerator": "cuda", "devices": 1}


class Wide(Waves):
    """A module wide enough that weights and gradients dominate its memory."""

    def __init__(self) -> None:
        super().__init__(width=2**17)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_its_values_are_those_of_a_run_by_hand(precision: str, tmp_path: Path) -> None:
    run = here(spec(tmp_path, precision, **CUDA))
    assert run.error is None
    notes = by_hand(AmpPrecision(precision), **CUDA).notes
    assert {n: [p.value for p in points] for n, points in run.curves.items()} == notes


def test_memory_is_the_devices_own_peak(tmp_path: Path) -> None:
    run = here(spec(tmp_path, module=Wide, max_epochs=4, **CUDA))
    weights = 4 * sum(p.numel() for p in Wide().parameters())
    assert run.memory_of == "device"
    assert run.peak_memory_bytes is not None
    assert 4 * weights < run.peak_memory_bytes < 12 * weights  # without the copy that `MetricComparison` makes
    assert run.step_s
    assert all(0 < seconds < 1 for seconds in run.step_s)
    assert run.matmul_flops == {"float32": 1.0}


def test_a_step_timer_never_waits() -> None:
    watch = StepTimer(torch.device("cuda"))
    watch.resume()
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            torch.ones(8, device="cuda").add_(1)
            watch.lap(8)
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    watch.pause()
    assert len(watch.elapsed_s()) == 6


def test_in_processes_of_their_own(tmp_path: Path) -> None:
    trainer = {**CUDA, "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    report = compare_precisions(Waves, Sea, ["fp32", "bf16"], trainer_kwargs=trainer, dirpath=tmp_path)
    assert [arm.errors for arm in report.arms.values()] == [{}, {}]
    assert report.arms["bf16"].memory_of == "device"
    assert torch.cuda.get_device_name() in report.arms["bf16"].runs[0].device
