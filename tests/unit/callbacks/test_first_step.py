"""The batch at which the first sample is taken."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, batches, fit, stock
from torch import Tensor

from lightning_amp import AmpPrecision
from lightning_amp.callbacks._first_step import FirstStep


class Asks(L.Callback):
    """Notes the first batch before which a step was applied."""

    def __init__(self) -> None:
        self.first, self.found = FirstStep(), -1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
        if self.first.is_applied(trainer) and self.found < 0:
            self.found = batch_idx


class AllNan(Toy):
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * torch.nan


class Loud(Toy):
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * 1e12


@pytest.mark.parametrize(
    ("module", "plugin", "batch"),
    [
        (Toy, lambda: AmpPrecision("bf16"), 1),
        (Toy, lambda: AmpPrecision("fp32", skip_nonfinite=False), 1),
        (Toy, lambda: None, 1),
        (Toy, lambda: stock("fp16", init_scale=16.0), 1),
        (AllNan, lambda: AmpPrecision("fp16"), 4),  # the scale does not move, so waiting is no use
        (AllNan, lambda: AmpPrecision("bf16"), 4),
        (Loud, lambda: AmpPrecision("fp16"), 17),  # the scale is below 1
        (Loud, lambda: AmpPrecision("fp16", scaler=4.0), 4),
    ],
)
def test_the_batch_that_is_sampled_first(module: Any, plugin: Any, batch: int) -> None:
    asks = Asks()
    fit(module, plugin(), batches(20), callbacks=[asks])
    assert asks.found == batch


def test_with_accumulation_the_first_sample_follows_the_first_step() -> None:
    asks = Asks()
    fit(Toy, AmpPrecision("bf16"), callbacks=[asks], accumulate_grad_batches=4)
    assert asks.found == 4
