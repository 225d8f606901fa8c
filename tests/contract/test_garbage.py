"""Nothing that holds a tensor waits for Python's garbage collector, which may run many steps later."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FrameType
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, batches, quiet_trainer
from torch import Tensor

from lightning_amp import AmpPrecision, GradientMonitor, MetricComparison, OverflowLocator, ScaleMonitor


class Found(L.Callback):
    """Collects the garbage of each batch: frames, and tensors of more than one value."""

    names: set[str]

    def on_train_batch_end(self, *args: Any) -> None:
        gc.collect()
        for thing in gc.garbage:
            if type(thing) is FrameType:
                self.names.add(thing.f_code.co_name)
            elif issubclass(type(thing), Tensor) and thing.numel() > 1:
                self.names.add(f"tensor {tuple(thing.shape)}")
        gc.garbage.clear()


@pytest.fixture
def all_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


class Bad(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == 2 else 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("observed", [False, True])
def test_a_skipped_step_and_second_runs_leave_no_frames_and_no_tensors(
    precision: str, observed: bool, all_garbage: None
) -> None:
    observers = [ScaleMonitor(), OverflowLocator(), GradientMonitor(every_n_steps=1), MetricComparison()] * observed
    plugin, found = AmpPrecision(precision, fp32_modules=["net.0"]), Found()
    found.names = set()
    settings: Any = {"max_epochs": 1, "val_check_interval": 3, "callbacks": [*observers, found]}
    quiet_trainer(plugins=[plugin], **settings).fit(Bad(), batches(5), batches(1))
    assert plugin.num_skipped
    assert found.names == set()
