"""What the first page of a tutorial shows."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from projects import Setup, project


class Classifier(L.LightningModule):
    """A small network on vectors, with everything a project usually logs."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.make_optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def vectors(count: int = 48, batch_size: int = 8, shuffle: bool = False) -> DataLoader[Any]:
    x = torch.randn(count, 16)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


@project("tutorials", quick=True)
def classifier() -> Setup:
    """Batch normalisation, dropout, AdamW, a metric, validation and predictions."""
    return Setup(Classifier(), vectors(shuffle=True), vectors(16), predict=vectors(16))
