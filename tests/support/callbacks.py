"""Callbacks that inject overflow or keep records, all callbacks of the package, and a logger that keeps its rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L

from lightning_amp import GradientMonitor, MetricComparison, OverflowLocator, ScaleMonitor
from lightning_amp.findings import StepRecord


class Poison(L.Callback):
    """Writes inf into the scaled gradients of chosen batches, or makes their loss NaN."""

    def __init__(self, gradient: Iterable[int] = (), loss: Iterable[int] = (), value: float = float("inf")) -> None:
        self.gradient, self.loss, self.value = set(gradient), set(loss), value
        self.batch = -1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batch += 1
        if self.batch in self.loss:
            batch.fill_(float("nan"))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.batch in self.gradient:
            next(p for p in pl_module.parameters() if p.grad is not None).grad.flatten()[:1] = self.value


class Records(L.Callback):
    """Keeps the record of each step of a fit. With `at_once`, it reads the flags after each batch."""

    def __init__(self, at_once: bool = False) -> None:
        self.all: list[StepRecord] = []
        self.at_once = at_once

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.precision_plugin.records.subscribe(self.all.extend, at_once=self.at_once)

    @property
    def reasons(self) -> list[str]:
        return [record.reason for record in self.all]


def all_of_ours(
    folder: Path | None = None, *, every_n_steps: int = 3, log_every_n_steps: int | None = None, **locator: Any
) -> list[L.Callback]:
    """Return all callbacks of this package. With a folder they write files."""
    return [
        ScaleMonitor(log_every_n_steps, dirpath=folder),
        OverflowLocator(dirpath=folder, **locator),
        GradientMonitor(every_n_steps),
        MetricComparison(),
    ]


class Recorder(L.pytorch.loggers.Logger):
    """A logger that keeps all steps and metrics."""

    name = version = "recorder"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.calls: list[str] = []

    @property
    def experiment(self) -> Any:
        return self.calls

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def users_rows(self) -> list[tuple[int | None, dict[str, float]]]:
        """Return the rows without the keys of this package."""
        rows = [(step, {k: v for k, v in row.items() if not k.startswith("amp/")}) for step, row in self.rows]
        return [(step, row) for step, row in rows if row.keys() - {"epoch"}]
