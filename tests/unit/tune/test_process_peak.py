"""On a CPU the recommended batch fits with everything that the process holds, not only with its tensors."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import find_batch_size

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a running process")

NUM_ROWS = 2048


class Simulates(L.LightningModule):
    """Each row needs 1 MiB that torch has not allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        simulated = np.ones((len(batch), 2**17))
        return self.net(batch + float(simulated[0, 0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 128

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(NUM_ROWS, 8), batch_size=self.batch_size)  # pyright: ignore[reportArgumentType]


class Images(Rows):
    """A data set of 0.4 GiB in memory, of which each batch is a small part."""

    def setup(self, stage: str) -> None:
        self.images = np.ones((NUM_ROWS, 26_000))

    def train_dataloader(self) -> Any:
        return DataLoader(self.images[:, :8].astype(np.float32), batch_size=self.batch_size)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "limit_gib"), [(Rows, 0.3), (Images, 0.65)])
def test_the_peak_of_the_process_counts(data: Any, limit_gib: float) -> None:
    """0.25 to 0.35 GiB are left for some 300 rows, and 0.125 GiB do not count."""
    kwargs = {"accelerator": "cpu"}
    found = find_batch_size(Simulates, data, ["fp32"], memory_limit_gib=limit_gib, trainer_kwargs=kwargs)["fp32"]
    assert 200 <= found.batch_size <= 448
    assert found.peak_gib <= limit_gib
    assert "growth of the process" in found.message
