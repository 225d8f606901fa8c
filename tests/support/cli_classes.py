"""Classes for command lines, such as `support.cli_classes.Net`."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Part(nn.Module):
    """A part of `Net`, chosen by its class path."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.size = size


class Net(L.LightningModule):
    """Saves its hyperparameters, as LightningCLI users' modules do."""

    def __init__(self, width: int, lr: float = 0.1, part: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.part = part
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).float().square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Rows(L.LightningDataModule):
    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(self.rows, 8), batch_size=4)  # pyright: ignore[reportArgumentType]

    val_dataloader = train_dataloader


class Counter(L.Callback):
    """A callback that cannot be pickled."""

    def __init__(self, start: int = 0) -> None:
        self.count, self.unpicklable = start, lambda: None
