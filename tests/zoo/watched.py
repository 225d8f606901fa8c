"""Modules whose validation has every side effect that could disturb a second pass, and a trainer that detects it."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from support.callbacks import Recorder
from support.trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.regression import MeanAbsoluteError, PearsonCorrCoef

FEATURES = 6


class Noisy(Dataset[Any]):
    """Regression data whose items are augmented with all three random generators at every read."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = self.x.sum(1) + torch.randn(length, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        noise = 0.1 * (random.random() + float(np.random.rand()) + float(torch.rand(())))
        return {"x": self.x[i] + noise, "y": self.y[i]}


class Everything(pl.LightningModule):
    """Dropout left on, random numbers, in-place edits, stateful metrics, lists, hooks, buffers: all in validation."""

    def __init__(self, *, manual: bool = False, num_loaders: int = 1, sync_dist: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.num_loaders, self.sync_dist = num_loaders, sync_dist
        first, last = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self.net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), last)
        self.mse = MeanSquaredError()
        by_hand = {"mae": MeanAbsoluteError(), "pearson": PearsonCorrCoef(), "m2": MeanSquaredError()}
        self.by_hand = MetricCollection(by_hand)
        self.mean = MeanMetric()
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.errors: list[Tensor] = []
        self.history: list[float] = []
        self.seen: list[float] = []
        self.generator = torch.Generator().manual_seed(5)
        first.register_forward_hook(lambda _module, _inputs, output: self.seen.append(output.numel()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        loss = (self(batch["x"]) - batch["y"]).square().mean()
        self.log("train_loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_validation_epoch_start(self) -> None:
        self.errors.clear()
        self.by_hand.reset()
        self.net[3].train()
        self.log("draw", torch.rand(()), sync_dist=self.sync_dist)

    def on_validation_batch_start(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.batches += 1

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch["x"], batch.pop("y")
        x += 0.05 * torch.rand_like(x) + 0.05 * random.random() + 0.05 * float(np.random.rand())
        x += 0.05 * torch.rand(x.shape, generator=self.generator)
        prediction = self(x)
        self.errors.append(prediction - y)
        self.mse(prediction, y)
        self.by_hand.update(prediction.float(), y)
        loss = (prediction - y).square().mean()
        self.log("val_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=self.sync_dist)
        self.log("mse", self.mse)
        if self.num_loaders > 1:
            self.log(
                f"worst_{dataloader_idx}", loss, reduce_fx="max", add_dataloader_idx=False, sync_dist=self.sync_dist
            )
        return prediction

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean.update(outputs.float().mean())
        self.log("mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        errors = torch.cat(self.errors).float()
        self.log("epoch_mse", errors.square().mean() + 0.01 * torch.rand(()), sync_dist=self.sync_dist)
        self.log_dict(
            {f"hand_{name}": value for name, value in self.by_hand.compute().items()}, sync_dist=self.sync_dist
        )
        self.history.append(float(errors.sum()))
        self.errors.clear()
        self.by_hand.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if not self.automatic_optimization:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mse_of_all"}}

    def on_train_epoch_end(self) -> None:
        key = "mse" if self.num_loaders == 1 else "mse/dataloader_idx_1"
        self.log("mse_of_all", self.trainer.callback_metrics[key])


def loaders(num: int) -> list[DataLoader[Any]]:
    """Return loaders that draw from the global generators in this process."""
    return [DataLoader(Noisy(24 - 4 * i, 10 + i), batch_size=8, shuffle=True, num_workers=0) for i in range(num)]


def fit(
    model: Everything, *extra: Callback, tmp_path: Any, logger: Recorder | None = None, **kwargs: Any
) -> pl.Trainer:
    """Fit two epochs with all callbacks that watch metrics."""
    monitor = "mse" if model.num_loaders == 1 else "mse/dataloader_idx_1"
    callbacks = [
        EarlyStopping(monitor, patience=20),
        *extra,
        ModelCheckpoint(tmp_path, monitor=monitor, save_top_k=2, filename="{epoch}-{step}"),
    ]
    options: dict[str, Any] = {"plugins": MixedPrecision("bf16-mixed", "cpu"), "num_sanity_val_steps": 1, **kwargs}
    trainer = quiet_trainer(
        accelerator="cpu", max_epochs=options.pop("max_epochs", 3), logger=logger or False, callbacks=callbacks,
        enable_checkpointing=True, **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Noisy(32, 0), batch_size=8, shuffle=True), loaders(model.num_loaders))
    return trainer


def everything_of(model: Everything, trainer: pl.Trainer, logger: Recorder | None) -> dict[str, Any]:
    """Return all state that training has produced, as comparable values, without the keys of the comparison."""
    optimizer = trainer.optimizers[0]
    checkpoint: Any = trainer.checkpoint_callback
    early: Any = trainer.early_stopping_callback
    metric_values = {
        f"{name}.{key}": torch.as_tensor(getattr(metric, key)).tolist()
        for name, metric in model.named_modules()
        for key in vars(metric).get("_defaults", {})
    }
    return {
        "parameters": {name: value.tolist() for name, value in model.state_dict().items()},
        "optimizer": {
            i: {key: torch.as_tensor(value).tolist() for key, value in state.items()}
            for i, state in enumerate(optimizer.state.values())
        },
        "lr": [group["lr"] for group in optimizer.param_groups],
        "metric_values": metric_values,
        "lists": (len(model.errors), model.history, model.seen),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),  # type: ignore
        "generator": model.generator.get_state().tolist(),
        "callback_metrics": _without_ours(trainer.callback_metrics),
        "logged_metrics": _without_ours(trainer.logged_metrics),
        "progress_bar_metrics": _without_ours(trainer.progress_bar_metrics),
        "rows": None if logger is None else [row for row in logger.rows if not _ours(row[1])],
        "checkpoints": {k.split("/")[-1]: float(v) for k, v in checkpoint.best_k_models.items()},
        "early": (float(early.best_score), early.wait_count, early.stopped_epoch),
        "progress": (
            trainer.global_step,
            trainer.current_epoch,
            trainer.fit_loop.state_dict(),
        ),
    }


def _ours(metrics: Any) -> bool:
    return any(name.startswith("amp/") for name in metrics)


def _without_ours(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if not name.startswith("amp/")}
