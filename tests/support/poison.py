"""Injected overflow, and a logger that keeps what it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L


class Poison(L.Callback):
    """Makes the gradients of chosen batches overflow (after the backward, still scaled), or their loss NaN."""

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


class Recorder(L.pytorch.loggers.Logger):
    """A logger that keeps what it is given."""

    name = version = "recorder"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step, **metrics})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...
