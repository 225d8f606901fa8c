"""Train sharded modules with and without the callbacks that run steps twice. `test_second_run.py` runs this script."""

from __future__ import annotations

import math
import os
import random
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from multi_rank import ranks
from multi_rank import second_run_faults as faults
from multi_rank import second_run_gathered as gathered
from multi_rank import second_run_modules as modules
from multi_rank.fsdp_models import OnTheCPU
from multi_rank.ranks import Scenarios
from multi_rank.second_run_modules import TROUBLE, Split
from support import Recorder, all_of_ours, quiet_trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp import (
    AmpPrecision,
    DynamicLossScaler,
    FSDPAmpPrecision,
    GradientMonitor,
    MetricComparison,
    OverflowLocator,
)

SCENARIOS: dict[int, Scenarios] = {2: {}, 4: {}}
PLUGINS = {"fsdp1": FSDPAmpPrecision, "fsdp1 half": FSDPAmpPrecision}
WORLD_SIZE = int(os.environ["WORLD_SIZE"])  # Lightning removes it at the end of a fit


def fit(module: Split, precision: str, callbacks: Any = (), scaler: Any = None, **options: Any) -> L.Trainer:
    """Train from a seed; validate after every third batch."""
    layout, wait = module.layout, timedelta(seconds=60)
    if layout == "ddp":
        strategy: Any = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True, timeout=wait)
    elif layout.startswith("fsdp1"):
        half = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)} if "half" in layout else {}
        strategy = OnTheCPU(auto_wrap_policy=set(module.units), timeout=wait, **half)
    else:
        shards = module.tensor_parallel
        strategy = ModelParallelStrategy(WORLD_SIZE // shards, shards, timeout=wait)
    if precision == "fp16" and scaler is None:
        scaler = DynamicLossScaler(1024.0)
    plugin = PLUGINS.get(layout, AmpPrecision)(precision, **({"scaler": scaler} if scaler else {}))
    defaults: dict[str, Any] = {"logger": Recorder(), "val_check_interval": 3, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(
        strategy=strategy, devices=WORLD_SIZE, plugins=[plugin], callbacks=list(callbacks),
        use_distributed_sampler=False, **defaults | options,
    )  # fmt: skip
    trainer.fit(module)
    return trainer


def made(kind: type[Split], layout: str, **arguments: Any) -> Split:
    L.seed_everything(0, verbose=False)
    return kind(layout, **arguments)


# -- the state that a run leaves ---------------------------------------------------------------------------------------


def state(module: Split, trainer: L.Trainer) -> dict[str, Any]:
    """Return everything that a run with our callbacks must leave as a run without them does."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    found: dict[str, Any] = {}
    model = trainer.strategy.model
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            found |= {f"parameter {name}": p.detach().clone() for name, p in module.named_parameters()}
    else:
        found |= {f"parameter {name}": local(p) for name, p in module.named_parameters()}
        found |= {
            f"gradient {name}": None if p.grad is None else local(p.grad) for name, p in module.named_parameters()
        }
    found |= {f"buffer {name}": local(b) for name, b in module.named_buffers()}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, values in enumerate(optimizer.state.values()):
            found |= {f"optimizer {i} {j} {k}": local(v) if isinstance(v, Tensor) else v for k, v in values.items()}
    for name, part in module.named_modules():
        found |= {f"attribute {name} {key}": plain(key, value) for key, value in vars(part).items() if key != "own"}
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("amp/")}
    found |= {"metrics": metrics, "rows": repr(trainer.logger.users_rows)}
    found |= {"torch random": torch.get_rng_state(), "python random": random.getstate()}
    found |= {"numpy random": repr(np.random.get_state())}
    plugin, scaler = trainer.precision_plugin, trainer.precision_plugin.scaler
    counts = (trainer.global_step, plugin.num_steps, plugin.num_skipped, trainer.fit_loop.epoch_loop.total_batch_idx)
    return found | {"counts": counts, "scaler": None if scaler is None else repr(scaler.state_dict())}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain(name: str, value: Any) -> Any:
    """Return values that can be compared; of hooks their number, of other objects their type."""
    if "hook" in name and hasattr(value, "__len__"):
        return len(value)
    if isinstance(value, Tensor):
        return local(value)
    if isinstance(value, Mapping):
        return {str(k): plain(str(k), v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(name, v) for v in value]
    return value if isinstance(value, (int, float, str, torch.dtype, type(None))) else type(value).__name__


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (
        isinstance(one, float) and math.isnan(one) and isinstance(other, float) and math.isnan(other)
    )


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if key not in one or not same(one[key], other.get(key)))


# -- with and without --------------------------------------------------------------------------------------------------


class Watched:
    """Our callbacks on one run, and what they said."""

    def __init__(self, module: Split, precision: str, **options: Any) -> None:
        self.callbacks = all_of_ours(every_n_steps=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.trainer = fit(module, precision, self.callbacks, **options)
        self.module = module
        _, locator, monitor, comparison = self.callbacks
        assert isinstance(locator, OverflowLocator)
        self.found = {
            "reports": [str(report) for report in locator.reports],
            "where": [(report.rank, report.cause, report.shard) for report in locator.reports],
            "said": [str(w.message) for w in caught if "LeafSpec" not in str(w.message)],
            "metric": str(comparison.report or ""),  # pyright: ignore[reportAttributeAccessIssue]
            "compared": [list(row) for row in comparison.table],  # pyright: ignore[reportAttributeAccessIssue]
            "gradients": [list(row) for row in monitor.table],  # pyright: ignore[reportAttributeAccessIssue]
        }


def with_and_without(
    kind: type[Split], layout: str, precision: str, trouble: Any = None, **options: Any
) -> dict[str, Any]:
    plain_run = made(kind, layout, trouble=trouble)
    expected = state(plain_run, fit(plain_run, precision, **options))
    watched = Watched(made(kind, layout, trouble=trouble), precision, **options)
    found = state(watched.module, watched.trainer)
    return {**watched.found, "differs": differences(expected, found), "compared_values": len(found)}


def pair(name: str) -> dict[str, Any]:
    """Run the scenario of a name: a module, a layout, a precision, and "troubled" if some batches are."""
    kind, layout, precision, *troubled = name.split("-")
    if kind == "accumulation":
        return with_and_without(modules.Tied, layout, precision, TROUBLE, accumulate_grad_batches=2)
    made_of = getattr(modules, kind, None) or getattr(gathered, kind)
    return with_and_without(made_of, layout, precision, TROUBLE if troubled else None)


# -- faults ------------------------------------------------------------------------------------------------------------


def fault(kind: type[faults.Faulty], layout: str, precision: str, scaler: Any = None, **arguments: Any) -> Any:
    options: dict[str, Any] = {"val_check_interval": None, "limit_train_batches": 4, "scaler": scaler}
    watched = Watched(made(kind, layout, **arguments), precision, **options)
    return watched.found


FAULTS: dict[str, Any] = {
    "data of rank 1": (faults.Data, "fsdp2", "bf16"),
    "data of rank 0": (faults.Data, "fsdp1", "fp16", {"rank": 0}),
    "data, tp": (faults.Data, "tp", "fp16", {"rank": 0}),
    "shard of a weight": (faults.Weight, "fsdp2", "fp16"),
    "shard of a weight, tp": (faults.Weight, "tp", "bf16"),
    "forward": (faults.Faulty, "fsdp2", "fp16", {"part": faults.Amplify}),
    "shard of a weight, policy": (faults.Weight, "policy", "bf16"),
    "forward, fsdp1": (faults.Faulty, "fsdp1", "fp16", {"part": faults.Amplify, "rank": 0}),
    "forward in a shard": (faults.Shard, "tp", "fp16"),
    "backward": (faults.Backward, "fsdp2", "fp16"),
    "loss": (faults.Loss, "fsdp2", "bf16", {"rank": 0}),
    "buffer": (faults.Buffer, "fsdp2", "fp16", {"part": faults.Factor}),
    "mask": (faults.Faulty, "fsdp2", "fp16", {"part": faults.Masked}),
    "root": (faults.Faulty, "fsdp2", "bf16", {"part": faults.Root}),
    "entropy": (faults.Entropy, "fsdp2", "fp16"),
    "validation": (faults.InValidation, "fsdp2", "fp16", {"part": faults.Amplify}),
    "validation, swapped": (faults.Swapped, "fsdp2", "fp16", {"part": faults.Amplify}),
    "validation, tp": (faults.InValidation, "tp", "fp16", {"part": faults.Amplify}),
    "loss scale": (faults.Faulty, "fsdp2", "fp16", {"scaler": 2.0**30}),
    "loss, and the scale of another rank": (faults.OfTwoRanks, "fsdp2", "fp16", {"detached": False}),
    "detached loss, and the scale of another rank": (faults.OfTwoRanks, "fsdp2", "fp16", {"detached": True}),
    "gathered rows": (faults.Contrast, "fsdp2", "fp16"),
    "gathered rows, ddp": (faults.Contrast, "ddp", "bf16"),
    "gathered gradients": (faults.ContrastInBackward, "fsdp2", "fp16"),
    "gathered gradients, ddp": (faults.ContrastInBackward, "ddp", "bf16"),
}


def named_fault(name: str) -> Any:
    kind, layout, precision, *arguments = FAULTS[name]
    return fault(kind, layout, precision, **(arguments[0] if arguments else {}))


SCENARIOS[2] |= {f"fault, {name}": lambda name=name: named_fault(name) for name in FAULTS}
SCENARIOS[4] |= {
    "fault, forward in a shard": lambda: fault(faults.Shard, "fsdp2 tp", "fp16", rank=3),
    "fault, shard of a weight": lambda: fault(faults.Weight, "fsdp2 tp", "bf16", rank=3),
    "fault, shard of a weight, hsdp": lambda: fault(faults.Weight, "hsdp", "fp16", rank=3),
    "fault, data": lambda: fault(faults.Data, "fsdp2 tp", "fp16", rank=1),
}


# -- numbers, against one process --------------------------------------------------------------------------------------


class ByHand(L.Callback):
    """Before the second step, runs its batch in fp32 and in mixed precision, and compares gathered gradients."""

    def __init__(self, precision: str) -> None:
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        self.scale = 1024.0 if precision == "fp16" else 1.0
        self.rows: dict[str, tuple[int, float, float]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            fp32, amp = self.gradients(pl_module, batch, False), self.gradients(pl_module, batch, True)
            pairs = {name: (fp32[name], amp[name]) for name in fp32}
            pairs["(all)"] = (
                torch.cat([*map(torch.flatten, fp32.values())]),
                torch.cat([*map(torch.flatten, amp.values())]),
            )
            for name, (true, rounded) in pairs.items():
                noise = (true - rounded).square().sum()
                sqnr_db = float(10 * torch.log10(true.square().sum() / noise))
                self.rows[name] = true.numel(), sqnr_db, float(true.abs().max())

    def gradients(self, module: Any, batch: Any, is_mixed: bool) -> dict[str, Tensor]:
        module.zero_grad()
        with torch.autocast("cpu", self.dtype, enabled=is_mixed):
            loss = module.loss(batch)
        scale = self.scale if is_mixed else 1.0
        (loss * scale).backward()
        found = {name: ranks.whole(p.grad).double() / scale for name, p in module.named_parameters()}
        module.zero_grad()
        return found


STANDS_STILL = 1e-7
"""A learning rate so small that the sampled gradients are those of the same weights in all runs."""


def numbers(kind: type[Split], layout: str, precision: str) -> dict[str, Any]:
    """Sample the second step by parameter and compare the last validation; then do the same in one process."""
    monitor, comparison = GradientMonitor(every_n_steps=100, by="parameter"), MetricComparison()
    by_hand = ByHand(precision)
    module = made(kind, layout, dropout=0.0)
    module.lr = STANDS_STILL
    is_whole = layout in ("fsdp2", "tp", "fsdp2 tp", "hsdp")  # others have a policy, or gradients that are not gathered
    callbacks = [by_hand, monitor, comparison] if is_whole else [monitor, comparison]
    trainer = fit(module, precision, callbacks, val_check_interval=None)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    if isinstance(trainer.strategy.model, FSDP):
        with FSDP.summon_full_params(trainer.strategy.model):
            weights = [p.detach().clone() for p in module.parameters()]
    else:
        weights = [ranks.whole(p) for p in module.parameters()]
    rows = [list(row) for row in monitor.table if row.step == 1]
    found = {"gradients": {row[1]: row for row in rows}, "fp32": {r.metric: r.fp32 for r in comparison.table.last}}
    found["by_hand"] = by_hand.rows
    found["amp"] = {r.metric: r.amp for r in comparison.table.last}
    if torch.distributed.get_rank() == 0:
        found["single"] = single(kind, precision, WORLD_SIZE // module.tensor_parallel, weights)
    return found


def single(kind: type[Split], precision: str, replicas: int, weights: list[Tensor]) -> dict[str, Any]:
    """Train on the batches of all replicas at once; evaluate the weights of the other run in fp32 by hand."""
    L.seed_everything(0, verbose=False)
    module = kind("", dropout=0.0)
    module.lr = STANDS_STILL
    monitor = GradientMonitor(every_n_steps=100, by="parameter")
    loaders = [together(module, replicas, training) for training in (True, False)]
    scaler = {"scaler": DynamicLossScaler(1024.0)} if precision == "fp16" else {}
    limits = {"limit_train_batches": 2, "limit_val_batches": 0}  # torchmetrics would wait for the other ranks
    quiet_trainer(plugins=[AmpPrecision(precision, **scaler)], callbacks=[monitor], **limits).fit(module, loaders[0])
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), weights, strict=True):
            parameter.copy_(value)
    module.eval()
    with torch.no_grad():
        batches = [(module.loss(batch), module.net(batch[0]) - batch[0].sum(1, keepdim=True)) for batch in loaders[1]]
    losses, errors = zip(*batches, strict=True)
    values = {"val_loss": float(torch.stack(losses).mean()), "error": float(torch.cat(errors).square().mean())}
    return {"gradients": {row.name: list(row) for row in monitor.table if row.step == 1}, "fp32": values}


def together(module: Split, replicas: int, training: bool) -> Any:
    """Return batches that have the rows of all replicas."""
    parts: list[tuple[Tensor, ...]] = []
    for replica in range(replicas):
        module.pretended_replica = replica
        parts.append(module.loader(training).dataset.tensors)
    size = modules.SIZE
    whole = [
        torch.cat([part[i][at : at + size] for at in range(0, len(parts[0][0]), size) for part in parts])
        for i in range(len(parts[0]))
    ]
    return DataLoader(TensorDataset(*whole), batch_size=size * replicas)


SCENARIOS[2] |= {
    f"numbers, {layout}, {precision}": lambda layout=layout, precision=precision: numbers(
        modules.Keeper, layout, precision
    )
    for layout in ("fsdp2", "policy", "tp", "fsdp1", "fsdp1 half", "ddp")
    for precision in ("fp16", "bf16")
    if (layout, precision) not in (("policy", "fp16"), ("fsdp1 half", "fp16"))
}
SCENARIOS[4] |= {
    f"numbers, {layout}, fp16": lambda layout=layout: numbers(modules.Keeper, layout, "fp16")
    for layout in ("fsdp2 tp", "hsdp")
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    pairs = {name: partial(pair, name) for name in sys.argv[2:] if "-" in name}
    ranks.main(pairs | SCENARIOS[WORLD_SIZE])
