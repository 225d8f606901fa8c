"""Which schedules are held, and when the host needs the flag of a skip for them."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from support import Poison, Toy, batches, fit
from support.promises import Plugins, fused_adamw
from torch.optim import lr_scheduler as lrs


def halving(optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
    return lrs.ExponentialLR(optimizer, 0.5)


# -- in a Trainer ------------------------------------------------------------------------------------------------------


def rate(trainer: L.Trainer) -> list[float]:
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.usefixtures("where_flags_live")
def test_rates_that_somebody_watches_are_decided_at_once() -> None:
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append(rate(trainer)[0])

    module = functools.partial(Toy, fused_adamw, None, halving)
    fit(module, Plugins(True).scaled(), batches(4), callbacks=[Poison(gradient=[1]), Watch()])
    assert seen == pytest.approx([0.005, 0.005, 0.0025, 0.00125])
