"""Fabric on two gloo ranks with trouble on one, beside the Trainer on the same data. `test_fabric.py` runs this script.

Each scenario trains in a Trainer with `AmpPrecision`, then in a Fabric loop with `FabricAmpPrecision`.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from multi_rank import ranks
from multi_rank.ranks import (
    EVERY_KIND,
    FEATURES,
    WINDOWS,
    Infinite,
    Scenarios,
    Trouble,
    Troubled,
    data,
    fused,
    initialise,
    plain,
    whole,
)
from support import DEVICE
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, DynamicLossScaler, FabricAmpPrecision

Clip = dict[str, float]
BY_NORM: Clip = {"max_norm": 0.5}
BY_VALUE: Clip = {"clip_val": 0.02}
TIMEOUT = timedelta(seconds=60)


class Model(nn.Module):
    """One module for both sides. `norm` has statistics that each rank keeps for itself."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh(), nn.Linear(16, 8)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def shard(module: Any, mesh: Any) -> Any:
    return fully_shard(module, mesh=mesh["data_parallel"])


def spoilt(loss: Tensor, model: Any, trouble: Trouble, number: int) -> Tensor:
    kind = trouble.get((torch.distributed.get_rank(), number))
    if kind == "gradient":
        return Infinite.apply(loss)
    if kind == "head":
        return loss + model.head.bias.sum() * torch.nan
    return loss * {"nan": torch.nan, "inf": torch.inf, None: 1.0}[kind]


class Module(Troubled):
    """The Trainer's side."""

    def __init__(self, trouble: Trouble, optimizer: Any, norm: bool, sharded: bool) -> None:
        super().__init__(trouble, optimizer)
        self.model, self.sharded = Model(norm), sharded

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Without a hook, the Trainer's plugin clips inside of a fused step, which rounds in another order."""

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self.model.head.weight, DTensor):
            shard(self.model, self.device_mesh)

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x).float(), x.sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return spoilt(self.loss(batch[0]), self.model, self.trouble, int(batch[1][0]))


def scaler(precision: str) -> DynamicLossScaler | None:
    return DynamicLossScaler(2.0**10, growth_interval=3) if precision == "fp16" else None


def by_trainer(
    precision: str, sharded: bool, optimizer: Any, trouble: Trouble, clip: Clip, norm: bool, accumulate: int
) -> dict[str, Any]:
    module = Module(trouble, optimizer, norm, sharded)
    initialise(module)
    strategy: Any = partial(ModelParallelStrategy, 2, 1) if sharded else DDPStrategy
    plugin = AmpPrecision(precision, scaler=scaler(precision))
    _, result = ranks.train(
        module, data(2), plugin, strategy, 2, accumulate_grad_batches=accumulate,
        gradient_clip_val=next(iter(clip.values()), None),
        gradient_clip_algorithm="value" if "clip_val" in clip else None,
    )  # fmt: skip
    return finished(result, module.model)


def finished(result: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    result["parameters"] = [whole(p) for p in model.parameters()]
    result["optimizer"] = [whole(v) for v in result["optimizer"]]
    result["buffers"] = [b.cpu().clone() for b in model.buffers()]
    return result


def launched(plugin: FabricAmpPrecision, sharded: bool) -> L.Fabric:
    strategy: Any = (
        FabricModelParallel(shard, data_parallel_size=2, tensor_parallel_size=1, timeout=TIMEOUT)
        if sharded
        else FabricDDP(timeout=TIMEOUT)
    )
    fabric = L.Fabric(accelerator=DEVICE, devices=2, strategy=strategy, plugins=[plugin])
    fabric.launch()
    return fabric


def by_fabric(
    precision: str, sharded: bool, optimizer: Any, trouble: Trouble, clip: Clip, norm: bool, accumulate: int
) -> dict[str, Any]:
    plugin = FabricAmpPrecision(precision, scaler=scaler(precision))
    records: list[Any] = []
    plugin.records.subscribe(records.extend)
    fabric = launched(plugin, sharded)
    module = Model(norm)
    initialise(module)
    if sharded:
        model: Any = fabric.setup_module(module)
        raw = optimizer(model.parameters())
        opt = fabric.setup_optimizers(raw)
    else:
        raw = optimizer(module.parameters())
        model, opt = fabric.setup(module, raw)
    schedule = plugin.guard(ExponentialLR(raw, 0.9))
    for index, (x, number) in enumerate(fabric.to_device(batch) for batch in data(2)):
        ends = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not ends):
            loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
            fabric.backward(spoilt(loss, module, trouble, int(number[0])) / accumulate)
        if ends:
            if clip:
                fabric.clip_gradients(model, opt, **clip)
            opt.step()
            opt.zero_grad()
            schedule.step()
    plugin.flush()
    scale = plugin.scaler
    states = [value for state in raw.state.values() for value in state.values()]
    return finished(
        {
            "optimizer": [value for value in states if isinstance(value, Tensor)],
            "lr": [raw.param_groups[0]["lr"]],
            "scale": None if scale is None else scale.get_scale(),
            "tracker": None if scale is None else scale.state_dict()["_growth_tracker"],
            "reasons": [r.reason for r in records],
            "scales": [r.next_scale for r in records],
            "indices": [(r.index, r.optimizer_idx) for r in records],
            "precisions": [r.precision for r in records],
            "counts": (plugin.num_steps, plugin.num_skipped),
        },
        module,
    )


def both(
    precision: str,
    *,
    sharded: bool = False,
    optimizer: Any = fused,
    trouble: Trouble = EVERY_KIND,
    clip: Clip | None = None,
    norm: bool = False,
    accumulate: int = 1,
) -> dict[str, Any]:
    arguments = (precision, sharded, optimizer, trouble, clip or {}, norm, accumulate)
    return {"trainer": by_trainer(*arguments), "fabric": by_fabric(*arguments)}


# the names of fused optimizers make these scenarios take a GPU's path
SCENARIOS: Scenarios = {"ddp_fp16_norm_fused": lambda: both("fp16", clip=BY_NORM)}
QUICK = tuple(SCENARIOS)
SCENARIOS.update({
    "ddp_fp16_norm_unfused": lambda: both("fp16", optimizer=plain, clip=BY_NORM),
    "ddp_fp16_value_fused": lambda: both("fp16", clip=BY_VALUE),
    "ddp_fp16_statistics_fused": lambda: both("fp16", norm=True),
    "ddp_bf16_norm_fused": lambda: both("bf16", clip=BY_NORM),
    "ddp_bf16_value_unfused": lambda: both("bf16", optimizer=plain, clip=BY_VALUE, norm=True),
    "ddp_fp16_accumulation_fused": lambda: both("fp16", trouble=WINDOWS, clip=BY_NORM, accumulate=3),
    "ddp_fp32_norm_fused": lambda: both("fp32", clip=BY_NORM),
    "fsdp_fp16_norm_fused": lambda: both("fp16", sharded=True, clip=BY_NORM),
    "fsdp_fp16_unfused": lambda: both("fp16", sharded=True, optimizer=plain),
    "fsdp_fp16_value_unfused": lambda: both("fp16", sharded=True, optimizer=plain, clip=BY_VALUE),
    "fsdp_bf16_norm_fused": lambda: both("bf16", sharded=True, clip=BY_NORM),
    "fsdp_bf16_norm_unfused": lambda: both("bf16", sharded=True, optimizer=plain, clip=BY_NORM),
    "fsdp_fp16_accumulation_fused": lambda: both("fp16", sharded=True, trouble=WINDOWS, clip=BY_NORM, accumulate=3),
    "fsdp_fp16_statistics_fused": lambda: both("fp16", sharded=True, norm=True),
})  # fmt: skip


def scenario(function: Any) -> Any:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def stuck() -> Any:
    """All ranks raise together, though only one of them has overflows."""
    trouble: Trouble = {(1, n): "gradient" for n in range(9)}
    messages: list[str] = []
    for sharded in (False, True):
        plugin = FabricAmpPrecision("fp16", scaler=DynamicLossScaler(1024.0, min_scale=1024.0, max_consecutive_skips=2))
        fabric = launched(plugin, sharded)
        module = Model()
        initialise(module)
        model = fabric.setup_module(module)
        opt = fabric.setup_optimizers(plain(model.parameters()))
        try:
            for x, number in data(2):
                opt.zero_grad()
                loss = model(fabric.to_device(x)).pow(2).mean()
                fabric.backward(spoilt(loss, module, trouble, int(number[0])))
                opt.step()
        except FloatingPointError as error:
            messages.append(str(error))
    return messages


@scenario
def decoupled() -> Any:
    """Rank 1 trains in a group of its own, while rank 0 only plays, as in SheepRL's decoupled algorithms."""
    make = partial(L.Fabric, accelerator=DEVICE, devices=2)
    make(strategy=FabricDDP(timeout=TIMEOUT)).launch()
    group = torch.distributed.new_group([1], timeout=TIMEOUT)
    counts: list[Any] = []
    for precision in ("fp16", "auto") if torch.distributed.get_rank() else ():
        plugin = FabricAmpPrecision(precision, process_group=group)
        fabric = make(strategy=FabricDDP(timeout=TIMEOUT, process_group=group), plugins=[plugin])
        fabric.launch()
        module = Model()
        model, opt = fabric.setup(module, fused(module.parameters()))
        for number, (x, _) in enumerate(data(2)):
            opt.zero_grad()
            loss = model(fabric.to_device(x)).pow(2).mean()
            fabric.backward(Infinite.apply(loss) if number == 1 else loss)
            fabric.clip_gradients(model, opt, max_norm=1.0)
            opt.step()
        counts.append((plugin.num_steps, plugin.num_skipped))
    torch.distributed.barrier()
    return counts


if __name__ == "__main__":
    ranks.main(SCENARIOS)
