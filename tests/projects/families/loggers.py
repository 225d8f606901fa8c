"""Loggers: what they wrote is compared by name."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import loggers as lg

from projects import Setup, project
from projects.families.tutorials import Classifier, vectors


class LogsMuch(Classifier):
    """Metrics on step and epoch, gradients' norms, hyperparameters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(L.pytorch.utilities.grad_norm(self.net, norm_type=2))


def loggers(**settings: Any) -> Any:
    return project("loggers", **settings)


def logged(logger: Any, observe: Any, **trainer: Any) -> Setup:
    trainer = {"logger": logger, "max_epochs": 2, "log_every_n_steps": 2, **trainer}
    return Setup(LogsMuch(), vectors(24), vectors(16), trainer=trainer, observe=observe)


@loggers(quick=True)
def logger_csv() -> Setup:
    """CSVLogger: its columns, and gradient norms, which must not contain the loss scale."""
    logger = lg.CSVLogger("logs")

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        names = sorted(n for n in rows[0] if not n.startswith("amp/"))
        norms = [float(r["grad_2.0_norm_total"]) for r in rows if r["grad_2.0_norm_total"]]
        return {"columns": names, "norms": len(norms), **{f"norm {i}": n for i, n in enumerate(norms)}}

    return logged(logger, observe)
