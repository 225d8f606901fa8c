"""A healthy run causes no report, and a bad batch is named. `test_diseases_named.py` plants the other faults.

Callbacks only observe. A run with all of them, in which steps are skipped, located and sampled, equals one without them
bit for bit, whatever the training step does.
"""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from support import Recorder, Toy, batches, fit
from support.averages import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.regression import MeanAbsoluteError

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor, OverflowLocator, ScaleMonitor


def patient() -> Toy:
    """Return a healthy module."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return Toy(lambda params: torch.optim.AdamW(params, lr=1e-3), net)


def one_bad_batch() -> DataLoader[Tensor]:
    data = torch.cat(list(batches(8)))
    data[4 * 5 + 1, 3] = float("inf")
    return DataLoader(data, batch_size=4)


def fp16() -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(1024.0))


def examine(plugin: AmpPrecision, data: Any = None) -> tuple[OverflowLocator, GradientMonitor]:
    locator, monitor = OverflowLocator(max_reports=2), GradientMonitor(4)
    fit(patient, plugin, data, callbacks=[ScaleMonitor(warn_below=None), locator, monitor])
    return locator, monitor


def test_healthy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        locator, monitor = examine(fp16())
    assert locator.reports == []
    assert all(row.headroom_bits > 0 and row.underflow_fraction < 0.01 and row.sqnr_db > 40 for row in monitor.table)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "ScaleMonitor: 0 of 8 steps skipped; scale 1024 -> 1024." in caplog.text
    assert "the gradient keeps 11 of 11 bits (68 dB)" in caplog.text
    assert "At the loss scale 1024 it fits, with 4 bits of room." in caplog.text
    assert "DynamicLossScaler" not in caplog.text  # no advice where nothing is lost


@pytest.mark.parametrize("plugin", [fp16, lambda: AmpPrecision("bf16"), lambda: AmpPrecision("fp32")])
def test_a_bad_batch(plugin: Any) -> None:
    locator, _ = examine(plugin(), one_bad_batch())
    (report,) = locator.reports
    assert (report.cause, report.batch_idx, report.module) == ("batch", 5, "net.0")
    assert report.entries == (("", 1, 32, (1, 3), "infinity"),)
    assert set(report.parameters) == {name for name, _ in patient().named_parameters()}


# -- only looking ------------------------------------------------------------------------------------------------------


class Everything(L.LightningModule):
    """A training step that uses everything a second run could disturb."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        first = nn.Linear(8, 16)
        self.net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.mse, self.by_hand = MeanSquaredError(), MetricCollection({"mae": MeanAbsoluteError()})
        self.seen: list[float] = []
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        first.register_forward_hook(lambda _module, _inputs, output: self.seen.append(output.numel()))
        first.weight.register_hook(lambda gradient: self.seen.append(2.0) or gradient * 0.5)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        batch += 0.01 * torch.rand_like(batch) + 0.01 * random.random()

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch += 0.05 * torch.rand(batch.shape, generator=self.generator).to(batch.device) + 0.05 * float(
            np.random.rand()
        )
        out = self.net(batch).float()
        self.mse(out.detach(), batch.sum(1, keepdim=True))
        self.by_hand.update(out.detach(), batch.sum(1, keepdim=True))
        self.log("mse", self.mse, on_step=True, on_epoch=True)
        self.count += 1
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        loss = (out - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss * (1e12 if batch_idx == 3 else torch.inf if batch_idx == 6 else 1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch, batch_idx)
        optimizer: Any = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()
        with torch.no_grad():
            self.net[0].weight.clamp_(-1, 1)
        return None

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.by_hand.compute())
        self.by_hand.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run_everything(manual: bool, watched: bool, **kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return every result of training, and the callbacks."""
    L.seed_everything(0, verbose=False)
    module, logger = Everything(manual), Recorder()
    watchers: list[Any] = [ScaleMonitor(), OverflowLocator(), GradientMonitor(2)] if watched else []
    callbacks = [*watchers, EMAWeightAveraging(decay=0.5)]
    plugin = AmpPrecision("fp16", scaler=DynamicLossScaler(64.0, growth_interval=3))
    trainer = fit(module, plugin, batches(8), logger=logger, callbacks=callbacks, max_epochs=2, **kwargs)
    left = {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "optimizer": str(trainer.optimizers[0].state_dict()),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "gradients": [None if p.grad is None else p.grad.tolist() for p in module.parameters()],
        "frozen": [p.requires_grad for p in module.parameters()],
        "lists": module.seen,
        "metrics": {name: float(v) for name, v in trainer.callback_metrics.items() if not name.startswith("amp/")},
        "rows": logger.users_rows,
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),  # type: ignore
        "generator": module.generator.get_state().tolist(),
        "steps": (plugin.num_steps, plugin.num_skipped, str(plugin.last_step), trainer.global_step),
    }
    return left, watchers


@pytest.mark.parametrize(
    ("manual", "accumulate"), [(False, 1), (False, 2), (True, 1)], ids=["automatic", "accumulating", "manual"]
)
@pytest.mark.few(1)
def test_only_looking_changes_nothing(manual: bool, accumulate: int) -> None:
    with_them, (_, locator, monitor) = run_everything(manual, True, accumulate_grad_batches=accumulate)
    without, _ = run_everything(manual, False, accumulate_grad_batches=accumulate)
    assert [key for key in without if str(without[key]) != str(with_them[key])] == []
    assert without["steps"][1] >= 4  # the run had an overflow to locate
    assert {report.cause for report in locator.reports} == {"backward", "loss"}
    assert {report.batch_idx for report in locator.reports} == {3, 6}
    assert len({row.step for row in monitor.table}) >= 3
