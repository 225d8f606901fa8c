"""The measuring callback of the headline, with the calls of CUDA replaced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import Toy, batches, fit
from support.promises import fused_adamw

from benchmarks.headline import _measure
from benchmarks.headline._measure import Lengths, Measure
from lightning_amp import AmpPrecision
from lightning_amp.measure import StepTimer

LENGTHS = Lengths(warm_up=4, timed=3, timed_s=60.0, least=2, watched=2)


class Cuda:
    """Record the calls in order, with the number of the step."""

    def __init__(self) -> None:
        self.mode = "default"
        self.calls: list[tuple[str, int]] = []
        self.step = 0

    def call(self, name: str) -> None:
        self.calls.append((name, self.step))

    def set_mode(self, mode: str) -> None:
        self.mode = mode
        self.call(mode)


class Peak:
    memory_of = "device"

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def resume(self) -> None:
        self.cuda.call("resume")

    def close(self) -> int:
        self.cuda.call("close")
        return 12345


class Waits(Toy):
    """A module that waits twice in each step, and fails once."""

    def __init__(self, cuda: Cuda, fails_at: int = -1) -> None:
        super().__init__(fused_adamw)
        self.cuda, self.fails_at = cuda, fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.cuda.step = batch_idx
        if batch_idx == self.fails_at:
            raise RuntimeError("a planted failure")
        if self.cuda.mode == "warn":
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.call("synchronize"))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", fake.set_mode)
    monkeypatch.setattr(_measure, "StepTimer", lambda device: StepTimer(torch.device("cpu")))
    monkeypatch.setattr(_measure, "PeakMemory", lambda *args: Peak(fake))
    return fake


def test_the_phases_on_a_gpu(cuda: Cuda) -> None:
    watch = Measure(torch.device("cuda", 0), 4, LENGTHS)
    trainer = fit(Waits(cuda), AmpPrecision("fp32"), batches(30), max_steps=-1, callbacks=[watch])
    assert trainer.global_step == 4 + 3 + 2
    # timing starts at the beginning and again after the warm-up
    assert [step for name, step in cuda.calls if name == "resume"] == [0, 3]
    assert [step for name, step in cuda.calls if name == "close"] == [6]
    assert "synchronize" not in {name for name, _ in cuda.calls}  # an event in the stream waits for itself only
    assert [(name, step) for name, step in cuda.calls if name in ("warn", "default")] == [("warn", 6), ("default", 8)]
    assert watch.waits == 2
    assert watch.memory["peak"] == 12345
    assert (len(watch.step_s), watch.memory_of) == (2, "device")


@pytest.mark.parametrize("step", [1, 5, 8])
def test_after_a_failure_nothing_is_left_on(cuda: Cuda, step: int) -> None:
    found = warnings.filters[:]
    watch = Measure(torch.device("cuda", 0), 4, LENGTHS)
    with pytest.raises(RuntimeError, match="planted"):
        fit(Waits(cuda, fails_at=step), AmpPrecision("fp32"), batches(30), max_steps=-1, callbacks=[watch])
    assert cuda.mode == "default"
    assert warnings.filters == found
