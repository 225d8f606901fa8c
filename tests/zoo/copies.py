"""Modules that are hard to copy."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import torch
from support.callbacks import Recorder
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from lightning_amp.shadow._module_copy import copy_module


class Tracker:
    """An object of the user that cannot be copied as a whole."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: list[float] = []


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.metrics = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
        self.values: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.values.append(1.0)
        self.metrics.update(batch)
        loss = self.net(batch).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict(self.metrics)
        self.trainer.should_stop = True
        self.print("hello")
        assert isinstance(self.logger, Recorder)
        self.logger.log_metrics({"by hand": 1.0}, step=0)
        self.logger.experiment.append("call")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def copied(module: pl.LightningModule) -> Any:
    return copy_module(module, {})
