"""Whether unscale, clip and step may run as one pass."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from support import Toy, fit
from support.promises import fused_adamw, plain_sgd

from lightning_amp import AmpPrecision


class ComesLate(L.Callback):
    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.callbacks.append(SeesGradients(self.calls))


class SeesGradients(L.Callback):
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self.calls.append(trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.calls.append(trainer.fit_loop.batch_idx)


@pytest.mark.parametrize("optimizer", [plain_sgd, fused_adamw])
def test_callbacks_that_come_late_are_called(optimizer: Any) -> None:
    late = ComesLate()
    fit(lambda: Toy(optimizer), AmpPrecision("fp32"), callbacks=[late])
    assert late.calls == [4, 4, 5, 5, 6, 6, 7, 7]
