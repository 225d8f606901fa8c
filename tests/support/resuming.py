"""A run that tests of resuming and of crashes can stop anywhere, and a comparison of all its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import (
    AmpPrecision,
    DynamicLossScaler,
    GradientMonitor,
    MetricComparison,
    OverflowLocator,
    ScaleMonitor,
)
from support import FEATURES, Toy, all_of_ours, batches, quiet_trainer, with_batch_norm
from support.averages import WeightAveraging
from support.promises import plain_adamw

EPOCH = 16


class Resumable:
    """A loader that Lightning can resume in the middle of an epoch. Each epoch has batches of its own.

    The batches `nan`, counted since the run began, are all NaN.
    """

    def __init__(self, nan: Iterable[int] = (), count: int = EPOCH, size: int = 4) -> None:
        self.nan, self.count, self.size = set(nan), count, size
        self.epoch = self.next = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        first, self.next = self.next, 0
        for index in range(first, self.count):
            number = self.epoch * self.count + index
            if index == self.count - 1:
                self.epoch, self.next = self.epoch + 1, 0
            else:
                self.next = index + 1
            batch = torch.randn(self.size, FEATURES, generator=torch.Generator().manual_seed(number))
            yield batch * float("nan") if number in self.nan else batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.next = state["epoch"], state["next"]


class Averaging(WeightAveraging):
    """Averages after every applied step."""

    def __init__(self) -> None:
        super().__init__(avg_fn=lambda average, current, _: average + (current - average) * 0.25)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class Checkpoints(ModelCheckpoint):
    """Saves only between two accumulation windows.

    After a resume, Lightning 2.6 saves the step that it resumed from again, after the first batch of the next window. A
    run that resumes from that checkpoint has lost the gradients of the batch, in every precision.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, *args)


class Overflow(L.Callback):
    """Makes gradients non-finite in chosen batches, counted since the run began.

    It overrides no hook that would make the plugin wait for the device.
    """

    def __init__(self, batches: Iterable[int] = ()) -> None:
        self.batches = set(batches)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx in self.batches:
            next(p for p in pl_module.parameters() if p.grad is not None).grad.flatten()[0] = float("inf")


class Net(Toy):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], schedule: bool = True) -> None:
        decay = functools.partial(ExponentialLR, gamma=0.97) if schedule else None
        super().__init__(optimizer, with_batch_norm(), decay)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def plugin_for(precision: str, **scaler: Any) -> AmpPrecision:
    """Return a plugin. In fp16, growth and hysteresis are always in the middle of their counts."""
    settings = {"init_scale": 256.0, "growth_interval": 5, "hysteresis": 2, "max_scale": 1024.0} | scaler
    return AmpPrecision(precision, scaler=DynamicLossScaler(**settings) if precision == "fp16" else None)


def ours(folder: Path | None = None) -> list[L.Callback]:
    """Return all callbacks of this package."""
    return all_of_ours(folder, every_n_steps=6, log_every_n_steps=7, max_reports=6)


def train(
    plugin: Any,
    steps: int,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = plain_adamw,
    gradient: Iterable[int] = (),
    nan: Iterable[int] = (),
    callbacks: Iterable[L.Callback] = (),
    checkpoints: Path | None = None,
    every_n_steps: int = 20,
    ckpt_path: Any = None,
    module: L.LightningModule | None = None,
    **kwargs: Any,
) -> L.Trainer:
    """Train up to `steps` attempted steps since the run began. Save checkpoints if there is a folder for them."""
    torch.manual_seed(0)
    module = module or Net(optimizer)
    callbacks = [*callbacks, Overflow(gradient)]
    if checkpoints is not None:
        callbacks.append(Checkpoints(checkpoints, filename="{step}", every_n_train_steps=every_n_steps, save_top_k=-1))
    trainer = quiet_trainer(
        plugins=[] if plugin is None else [plugin], callbacks=callbacks, max_epochs=-1, max_steps=steps,
        enable_checkpointing=checkpoints is not None, num_sanity_val_steps=0, **kwargs,
    )  # fmt: skip
    trainer.fit(module, Resumable(nan), batches(3, seed=7), ckpt_path=ckpt_path)
    return trainer


def everything(trainer: L.Trainer, folder: Path | None = None) -> dict[str, Any]:
    """Return all state that a resumed run must share with a run that never stopped."""
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    found: dict[str, Any] = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "global step": trainer.global_step,
    }
    if isinstance(plugin, AmpPrecision):
        found["scaler"] = None if plugin.scaler is None else plugin.scaler.state_dict()
        found["counters"] = (plugin.num_steps, plugin.num_skipped, plugin.last_step)
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging):
            found["average"] = callback._average_model.state_dict()
        if isinstance(callback, ScaleMonitor):
            found["history"] = list(callback.history)
            found["summary"] = callback.history.summary()
        if isinstance(callback, OverflowLocator):
            found["reports"] = [report.as_dict() for report in callback.reports]
            found["overflows"] = callback.state_dict()["num_overflows"]
        if isinstance(callback, GradientMonitor):
            found["gradients"] = [tuple(row) for row in callback.table]
            found["recommended"] = callback.recommended_scale
        if isinstance(callback, MetricComparison):
            found["comparison"] = [tuple(row) for row in callback.table]
    if folder is not None:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".csv", ".json"))
        found["files"] = {path.name: path.read_text() for path in files}
    return found


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Compare bit for bit. The error says which part differs."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(_flat(value, name), _flat(b[name], name), rtol=0.0, atol=0.0, equal_nan=True)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return tensors by path. Any other value becomes part of a path, as text in which NaN equals NaN."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        parts = {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{path}/{i}").items()}
        return {f"{path}/len": torch.tensor(len(value)), **parts}
    if isinstance(value, (int, float)):
        return {path: torch.tensor(float(value), dtype=torch.float64)}
    return {f"{path}={value!r}": torch.zeros(())}
