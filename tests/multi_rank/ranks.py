"""Tools for scenarios of ranks: numbered batches, trouble on one rank, a report, and the main function."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support import Records, WithoutAutocast, assert_same, flags_on_a_device, quiet_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_amp import AmpPrecision, DynamicLossScaler

BATCHES, SIZE, FEATURES = 9, 4, 8
Scenarios = dict[str, Callable[[], Any]]
Trouble = dict[tuple[int, int], str]
"""Maps (rank, batch) to its trouble: "nan" or "inf" (loss and gradients), "detached" (only the loss), "head" (a loss
that reaches one parameter, on this rank only), or "gradient" (only the gradients).
"""
EVERY_KIND: Trouble = {(1, 1): "nan", (1, 2): "inf", (0, 4): "gradient", (0, 6): "inf", (1, 6): "gradient"}
BAD = (1, 2, 4, 6)
ONE_PER_BATCH = ["none", "loss", "loss", "none", "gradient", "none", "loss", "none", "none"]
"""Why each batch's step is skipped in a run with `EVERY_KIND` of trouble."""
WINDOWS: Trouble = {(1, 0): "gradient", (0, 4): "nan", (1, 3): "inf"}
"""Trouble in the first two of three windows of three batches."""
FIRST_WINDOWS = (0, 1, 2, 3, 4, 5)

fused = partial(torch.optim.AdamW, lr=0.01, fused=True)
plain = partial(torch.optim.AdamW, lr=0.01)


def data(replicas: int, without: tuple[int, ...] = (), replica: int | None = None) -> DataLoader[Any]:
    """Each replica gets its part of each batch, and a batch knows its number."""
    x = torch.randn(BATCHES * SIZE * 2, FEATURES, generator=torch.Generator().manual_seed(0))
    number = torch.arange(BATCHES).repeat_interleave(SIZE * 2)
    keep = torch.tensor([int(n) not in without for n in number])
    dataset = TensorDataset(x[keep], number[keep])
    sampler = None
    if replicas > 1:  # Lightning's own sampler would shuffle
        if replica is None:
            started = torch.distributed.is_initialized()
            replica = torch.distributed.get_rank() if started else int(os.environ["LOCAL_RANK"])
        sampler = DistributedSampler(dataset, replicas, replica, shuffle=False)
    return DataLoader(dataset, batch_size=SIZE * 2 // replicas, sampler=sampler)


class Infinite(torch.autograd.Function):
    """Multiply a gradient by infinity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


class Troubled(L.LightningModule):
    """A regression with `body` and `head` whose loss or gradient is not finite where `trouble` says so."""

    body: nn.Module
    head: nn.Module

    def __init__(self, trouble: Trouble | None = None, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.trouble, self.make_optimizer = trouble or {}, optimizer or plain

    def spoilt(self, loss: Tensor, number: int) -> Tensor:
        kind = self.trouble.get((self.global_rank, number))
        if kind == "gradient":
            return Infinite.apply(loss)
        if kind == "detached":
            return loss + torch.inf
        if kind == "head":
            return loss + self.head.bias.sum() * torch.nan
        return loss * {"nan": torch.nan, "inf": torch.inf, None: 1.0}[kind]

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.body(x)).float(), x.sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, number = batch
        return self.spoilt(self.loss(x), int(number[0]))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


def scaled(precision: str = "fp16", scale: float = 1024.0, **kwargs: Any) -> AmpPrecision:
    """Make a plugin with fp16's scaling, or with bf16's guard, but without autocast: bit-equal to fp32."""
    scaler = DynamicLossScaler(scale, growth_interval=3) if precision == "fp16" else None
    return WithoutAutocast(precision, scaler=scaler, **kwargs)


def initialise(module: nn.Module) -> None:
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


def train(
    module: L.LightningModule, loader: Any, plugin: AmpPrecision | None, strategy: Any, devices: int, **kwargs: Any
) -> tuple[L.Trainer, dict[str, Any]]:
    """Train and return a report; on several devices with a strategy, which gets its timeout here."""
    records, plugin = Records(), plugin or scaled()
    fit = {name: kwargs.pop(name) for name in ("ckpt_path", "val_dataloaders") if name in kwargs}
    if devices > 1:
        kwargs |= {"strategy": strategy(timeout=timedelta(seconds=60)), "devices": devices}
        kwargs["use_distributed_sampler"] = False
    callbacks = [*kwargs.pop("callbacks", ()), records]
    trainer = quiet_trainer(plugins=[plugin], callbacks=callbacks, **kwargs)
    trainer.fit(module, loader, **fit)
    return trainer, report(trainer, plugin, records)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy on the host, of all shards of a sharded tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _on_host(tensor: Tensor) -> Tensor:
    # a comparison of sharded parameters gathers them first
    return tensor if hasattr(tensor, "full_tensor") else tensor.cpu()


def report(trainer: L.Trainer, plugin: AmpPrecision, records: Records) -> dict[str, Any]:
    """Return every value that must be the same on all ranks, and the buffers, which may differ."""
    states = [value for o in trainer.optimizers for state in o.state.values() for value in state.values()]
    scaler = plugin.scaler
    return {
        "parameters": [_on_host(p.detach()).clone() for p in trainer.lightning_module.parameters()],
        "buffers": [b.cpu().clone() for b in trainer.lightning_module.buffers()],
        "optimizer": [_on_host(value) for value in states if isinstance(value, Tensor)],
        "lr": [o.param_groups[0]["lr"] for o in trainer.optimizers],
        "scale": None if scaler is None else scaler.get_scale(),
        "tracker": None if scaler is None else scaler.state_dict()["_growth_tracker"],
        "reasons": records.reasons,
        "scales": [r.next_scale for r in records.all],
        "indices": [(r.index, r.optimizer_idx) for r in records.all],
        "precisions": [r.precision for r in records.all],
        "counts": (plugin.num_steps, plugin.num_skipped),
    }


def assert_agree(one: dict[str, Any], other: dict[str, Any], *keys: str) -> None:
    """Compare bit for bit; by default without the buffers, which may come from each rank's own batches."""
    for key in keys or one.keys() - {"buffers"}:
        if key in ("parameters", "optimizer", "buffers"):
            assert_same(one[key], other[key])
        else:
            assert one[key] == other[key], key


def folder() -> Path:
    """Return the file for one rank's results."""
    return Path(sys.argv[1])


def main(scenarios: Scenarios) -> None:
    """Run the scenarios named on the command line, or all, and save this rank's results."""
    warnings.filterwarnings("ignore", message=".*does not have many workers|.*LeafSpec|.*find_unused_parameters=True")
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
    results: dict[str, Any] = {}
    for name, run in scenarios.items():
        if name in (sys.argv[2:] or scenarios):
            takes_a_gpus_path = "fused" in name and "unfused" not in name
            with flags_on_a_device() if takes_a_gpus_path else contextlib.nullcontext():
                results[name] = run()
    torch.save(results, folder() / f"rank{torch.distributed.get_rank()}.pt")
    # end gloo's threads before the interpreter: otherwise it sometimes aborts ("terminate called")
    torch.distributed.destroy_process_group()
