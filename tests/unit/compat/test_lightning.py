"""Private names of Lightning still do what we need of them. Tests that need a Trainer are in `tests/unit/shadow`."""

from __future__ import annotations

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from lightning_amp._compat import _lightning


def test_the_optimizer_of_the_user() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    assert _lightning.unwrap_optimizer(LightningOptimizer(optimizer)) is optimizer
    assert _lightning.unwrap_optimizer(optimizer) is optimizer


def test_a_plain_process_writes_files() -> None:
    assert _lightning.is_rank_zero()
