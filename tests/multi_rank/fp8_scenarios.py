"""Train in emulated fp8 on two gloo ranks, in DDP and in `ModelParallelStrategy`. `test_fp8.py` runs this script."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from multi_rank import ranks
from multi_rank.ranks import Scenarios, whole
from support import quiet_trainer
from support.fp8 import Deep, emulated
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_amp import AmpPrecision

STEPS, SIZE, FEATURES = 6, 16, 8


class Regression(L.LightningModule):
    """Build the module; `layout` is "fsdp", "fsdp bf16" (gathers weights in bf16), "tp", or "" (no sharding)."""

    def __init__(self, layout: str = "") -> None:
        super().__init__()
        self.layout = layout
        torch.manual_seed(0)
        self.net = Deep()
        self.outputs: list[Tensor] = []

    def configure_model(self) -> None:
        if "fsdp" in self.layout:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "bf16" in self.layout else None)
            for module in (*list(self.net)[2:-1:2], self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"], mp_policy=policy)
        elif self.layout == "tp":
            plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.net(x).float(), x.sum(1, keepdim=True))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.net(batch[0]).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(replicas: int) -> Any:
    x = torch.randn(STEPS * SIZE, FEATURES, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x)
    sampler = None if replicas == 1 else DistributedSampler(dataset, 2, int(os.environ["LOCAL_RANK"]), shuffle=False)
    return DataLoader(dataset, batch_size=SIZE // replicas, sampler=sampler)


def run(layout: str, precision: str, strategy: Any = None, replicas: int = 1) -> dict[str, Any]:
    plugin = AmpPrecision(precision, fp8_recipe=emulated() if precision == "fp8" else None)
    module = Regression(layout)
    kwargs = {} if strategy is None else {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    trainer = quiet_trainer(plugins=[plugin], limit_val_batches=1, num_sanity_val_steps=0, **kwargs)
    trainer.fit(module, data(replicas), data(replicas))
    return {
        "parameters": torch.cat([whole(p).flatten() for p in module.parameters()]),
        "keys": list(module.state_dict()),
        "types": [type(m).__name__ for m in module.modules()],
        "layers": dict(plugin.fp8_layers),
        "counts": (plugin.num_steps, plugin.num_skipped),
        "output": module.outputs[-1],
    }


def sharded(tensor_parallel: bool = False) -> ModelParallelStrategy:
    sizes = (1, 2) if tensor_parallel else (2, 1)
    return ModelParallelStrategy(*sizes, timeout=timedelta(seconds=60))


def alone() -> Any:
    """Train in one process, on rank 0 only."""
    if torch.distributed.get_rank() > 0:
        return None
    return {precision: run("", precision) for precision in ("fp8", "bf16")}


SCENARIOS: Scenarios = {
    "ddp": lambda: run("", "fp8", DDPStrategy(timeout=timedelta(seconds=60)), 2),
    "fsdp": lambda: run("fsdp", "fp8", sharded(), 2),
    "fsdp_bf16": lambda: run("fsdp bf16", "fp8", sharded(), 2),
    "fsdp_without_fp8": lambda: run("fsdp", "bf16", sharded(), 2),
    "tensor_parallel": lambda: run("tp", "fp8", sharded(tensor_parallel=True), 1),
    "alone": alone,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ranks.main(SCENARIOS)
