"""Modules that `MetricComparison` compares, and their trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.devices import DEVICE
from support.trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.callbacks._metric_comparison import MetricComparison


class Model(pl.LightningModule):
    """Logs a loss, the state of autocast, and the number of batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())
        self.log("autocast", float(torch.is_autocast_enabled(DEVICE)))
        self.log("batches", 1.0, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class WithTest(Model):
    """Has a `test_step` with its own hooks."""

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        output = self.net(batch)
        loss = (output * output).mean()  # on a GPU, `square` is in fp32
        self.log("test_loss", loss)
        self.log("autocast", float(torch.is_autocast_enabled(DEVICE)))
        self.log("batches", 1.0, reduce_fx="sum")
        return loss

    def on_test_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.events = [*getattr(self, "events", []), "start"]

    def on_test_batch_end(self, outputs: Tensor, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("output_bits", float(torch.finfo(outputs.dtype).bits))
        self.events = [*self.events, "end"]

    def on_test_epoch_end(self) -> None:
        self.log("hooks", float(len(self.events)))


class OnlyTest(WithTest):
    validation_step = pl.LightningModule.validation_step  # type: ignore[assignment]


class Fails(Model):
    """Fails in the shadow in chosen epochs."""

    def __init__(self, error: Exception, epochs: tuple[int, ...], where: str = "validation_step") -> None:
        super().__init__()
        self.error, self.epochs, self.where = error, epochs, where

    def maybe(self, where: str, batch_idx: int = 1) -> None:
        shadow = type(self.trainer) is not pl.Trainer
        if shadow and where == self.where and batch_idx == 1 and self.current_epoch in self.epochs:
            raise self.error

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.maybe("validation_step", batch_idx)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.maybe("on_validation_epoch_end")


def data() -> DataLoader[Any]:
    return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), batch_size=4)


def make_trainer(*callbacks: Callback, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 2, "callbacks": list(callbacks)}
    return quiet_trainer(**(options | {"plugins": MixedPrecision("bf16-mixed", DEVICE)} | kwargs))


def fit(comparison: MetricComparison, module: pl.LightningModule | None = None, **kwargs: Any) -> pl.Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(comparison, *kwargs.pop("callbacks", []), **kwargs)
    trainer.fit(module or Model(), data(), data())
    return trainer


def values(comparison: MetricComparison, metric: str, field: str) -> list[float]:
    return [getattr(row, field) for row in comparison.table if row.metric == metric]


def count(caught: pytest.WarningsRecorder) -> int:
    """Return how many of the warnings are ours."""
    return sum("MetricComparison" in str(warning.message) for warning in caught)
