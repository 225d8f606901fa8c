"""Loggers: what they wrote is compared by name."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import loggers as lg
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment

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


@loggers(needs=("tensorboard",))
def logger_tensorboard() -> Setup:
    """TensorBoardLogger with the graph, hyperparameters and a histogram of the weights."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = lg.TensorBoardLogger("logs", log_graph=False, default_hp_metric=False)

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        logger.experiment.add_histogram("weights", module.net[0].weight, 0)
        logger.save()
        logger.experiment.flush()
        tags = EventAccumulator(logger.log_dir).Reload().Tags()
        return {"scalars": sorted(t for t in tags["scalars"] if not t.startswith("amp/"))}

    return logged(logger, observe)


@loggers(needs=("tensorboard",))
def logger_with_graph() -> Setup:
    """TensorBoardLogger that traces the module's graph."""

    module = LogsMuch()
    module.example_input_array = torch.zeros(2, 16)
    return Setup(module, vectors(24), vectors(16), trainer={"logger": lg.TensorBoardLogger("logs", log_graph=True)})


@loggers()
def logger_two_at_once() -> Setup:
    """Two CSV loggers; checkpoints go into the folder of the first."""
    pair = [lg.CSVLogger("a"), lg.CSVLogger("b", name="other")]

    def observe(trainer: L.Trainer, module: L.LightningModule) -> Mapping[str, Any]:
        return {"files": sorted(str(p) for folder in "ab" for p in Path(folder).rglob("*") if p.is_file())}

    return logged(pair, observe, enable_checkpointing=True)


@loggers()
def logger_own() -> Setup:
    """A custom logger that keeps all values in a list."""

    class Kept(Logger):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int, list[str]]] = []
            self.params: dict[str, Any] = {}

        @property
        def name(self) -> str:
            return "kept"

        @property
        def version(self) -> str:
            return "0"

        @property
        @rank_zero_experiment
        def experiment(self) -> Any:
            return self

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            names = sorted(n for n in metrics if n != "epoch" and not n.startswith("amp/"))
            self.rows += [(step or 0, names)] * bool(names)

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.params = dict(params)

    logger = Kept()
    return logged(logger, lambda t, m: {"rows": logger.rows, "params": logger.params})


@loggers(needs=("mlflow",))
def logger_mlflow() -> Setup:
    """MLFlowLogger into a folder."""
    return logged(lg.MLFlowLogger(tracking_uri="file:./runs"), lambda t, m: {})


@loggers(needs=("wandb",))
def logger_wandb_offline() -> Setup:
    """WandbLogger offline, watching gradients: its hooks run in the backward."""
    logger = lg.WandbLogger(offline=True, project="projects")
    setup = logged(logger, lambda t, m: {})
    logger.watch(setup.module, log="all", log_freq=2)
    return setup
