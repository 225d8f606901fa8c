"""`doctor`, `find_batch_size` and the step timer measure on a device of any type."""

from __future__ import annotations

import gc
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo.compared import here

from lightning_amp import doctor, find_batch_size
from lightning_amp.advice import _machine
from lightning_amp.compare import Run, Spec
from lightning_amp.measure import DeviceClock
from lightning_amp.measure import _step_timer as clock_module
from lightning_amp.tune import _batch_size_run

pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu", reason="needs a device other than the CPU"),
    pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary"),
]
ON_DEVICE = {"accelerator": DEVICE, "devices": 1}


class Net(L.LightningModule):
    """A module that reads its loss in each step, with more optimizer state than activations."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net, self.seen = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1)), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.seen += loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


class Rows(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(256, 8), torch.randn(256, 1)), batch_size=self.batch_size)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products that a CPU computes at once."""
    for name in ("_SIZES", "_SHORT_SIZES"):
        monkeypatch.setattr(_machine, name, {"cuda": (32, 64), "other": (32, 64)})


@pytest.mark.usefixtures("small")
def test_doctor_looks_at_the_device(device: torch.device) -> None:
    report = doctor(partial(Net, 2048), partial(Rows, 8), precision="bf16", device=str(device))
    assert report.machine.device_type == device.type
    assert [found.name for found in report.machine.formats if found.support != "missing"][:1] == ["fp32"]
    assert report.step is not None
    assert report.step.memory.states > 0
    assert "On a CPU that is free" not in str(report)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")

    def run(spec: Spec, on_progress: Any) -> Run:
        gc.collect()
        return here(pickle.loads(cloudpickle.dumps(spec)))

    monkeypatch.setattr(_batch_size_run, "run_in_process", run)
    monkeypatch.setattr(_batch_size_run, "_STEADY_S", 0.0)


@pytest.mark.usefixtures("in_this_process")
def test_a_batch_size_is_found_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = find_batch_size(Net, Rows, ["fp32"], memory_limit_gib=1.0, trainer_kwargs=ON_DEVICE)["fp32"]
    assert result.batch_size == 256
    assert 0 < result.peak_gib < 1
    if DEVICE == "cuda":  # and the GPU's properties tell how much memory it has
        found = find_batch_size(Net, Rows, ["fp32"], trainer_kwargs=ON_DEVICE)["fp32"]
        assert found.batch_size == 256


def test_a_device_without_timed_events_is_waited_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "_has_timed_events", lambda where: False)
    clock = DeviceClock(device)
    first = clock.now()
    torch.ones(8, device=device).add_(1)
    assert isinstance(first, float)
    assert clock.seconds(first, clock.now()) > 0
