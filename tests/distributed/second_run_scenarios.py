"""Train sharded modules with and without the callbacks that run steps twice. `test_second_run.py` runs this script."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning as L
import numpy as np
import torch
from distributed import ranks
from distributed import second_run_modules as modules
from distributed.fsdp_models import OnTheCPU
from distributed.ranks import Scenarios
from distributed.second_run_modules import TROUBLE, Split
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from support import Recorder, all_of_ours, quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from lightning_amp import AmpPrecision, DynamicLossScaler, FSDPAmpPrecision, OverflowLocator

SCENARIOS: dict[int, Scenarios] = {2: {}, 4: {}}
PLUGINS = {"fsdp1": FSDPAmpPrecision}
WORLD_SIZE = int(os.environ["WORLD_SIZE"])  # Lightning removes it at the end of a fit


def fit(module: Split, precision: str, callbacks: Any = (), scaler: Any = None, **options: Any) -> L.Trainer:
    """Train from a seed; validate after every third batch."""
    layout, wait = module.layout, timedelta(seconds=60)
    if layout == "ddp":
        strategy: Any = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True, timeout=wait)
    elif layout == "fsdp1":
        strategy = OnTheCPU(auto_wrap_policy=set(module.units), timeout=wait)
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
        found |= {f"gradient {name}": None if p.grad is None else local(p.grad) for name, p in module.named_parameters()}
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
    return one == other or (one != one and other != other)


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


def pair(name: str, world_size: int = 2, **options: Any) -> None:
    """Add a scenario: a module, a layout, a precision, and "troubled" if some batches are."""
    kind, layout, precision, *troubled = name.split("-")
    trouble = TROUBLE if troubled else None
    SCENARIOS[world_size][name] = lambda: with_and_without(
        getattr(modules, kind), layout, precision, trouble, **options
    )


EVERYWHERE = (
    "Tied", "Llama", "Routed", "Normed", "Adapted", "Manual", "Teacher", "Keeper", "Checkpointed", "Compiled", "Uneven",
    "Branched",
)  # fmt: skip
for one in EVERYWHERE:
    pair(f"{one}-fsdp2-fp16-troubled")
    pair(f"{one}-fsdp2-bf16")
for one in ("Tied", "Manual", "Normed", "Keeper", "Adapted"):
    pair(f"{one}-fsdp1-fp16-troubled")
    pair(f"{one}-ddp-fp16-troubled")
for one in ("Tied", "Manual", "Keeper", "Routed", "Teacher", "Adapted"):
    pair(f"{one}-policy-bf16")
    pair(f"{one}-tp-fp16-troubled")
    pair(f"{one}-offload-bf16")
for one in ("Tied", "Keeper", "Manual", "Normed"):
    pair(f"{one}-tp-bf16")
    pair(f"{one}-fsdp1-bf16")
pair("StepsInHooks-fsdp2-bf16")
pair("StepsInHooks-ddp-bf16")
SCENARIOS[2]["accumulation-fsdp2-fp16-troubled"] = lambda: with_and_without(
    modules.Tied, "fsdp2", "fp16", TROUBLE, accumulate_grad_batches=2
)
SCENARIOS[2]["accumulation-fsdp1-fp16-troubled"] = lambda: with_and_without(
    modules.Tied, "fsdp1", "fp16", TROUBLE, accumulate_grad_batches=2
)
SCENARIOS[2]["accumulation-tp-bf16"] = lambda: with_and_without(
    modules.Tied, "tp", "bf16", TROUBLE, accumulate_grad_batches=2
)
for one in ("Tied", "Keeper", "Manual", "Normed"):
    pair(f"{one}-fsdp2 tp-fp16-troubled", 4)
    pair(f"{one}-fsdp2 tp-bf16", 4)
    pair(f"{one}-hsdp-fp16-troubled", 4)
    pair(f"{one}-hsdp-bf16", 4)

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    ranks.main(SCENARIOS[WORLD_SIZE])
