"""Ranks that fail in the second run of a step. `test_second_run_failures.py` runs this script."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from multi_rank.ranks import FEATURES, Scenarios, Troubled, data, folder, initialise, main, scaled
from multi_rank.sharded_scenarios import Regression
from support import quiet_trainer
from torch import Tensor, nn

from lightning_amp import AmpPrecision, GradientMonitor, MetricComparison, OverflowLocator, ScaleMonitor
from lightning_amp.shadow._ranks import RankMissingError

WORLD_SIZE = int(os.environ["WORLD_SIZE"])  # Lightning removes it at the end of a fit


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("the backward has a problem")


class Gathers(Troubled):
    """Exchanges values with the other ranks in each step, and between the two layers of its body."""

    def __init__(self) -> None:
        super().__init__({(1, 2): "nan"})
        self.body, self.head = nn.LSTM(FEATURES, 8), nn.Linear(8, 1)

    def loss(self, x: Tensor) -> Tensor:
        hidden = self.body(x)[0]
        everybodys = self.all_gather(hidden, sync_grads=True).flatten(0, 1)
        return nn.functional.mse_loss(self.head(everybodys).float(), self.all_gather(x.sum(1, True)).flatten(0, 1))


class Fails:
    """Fails in the second run of a step, and only there, on one rank or on both."""

    def fail(self: Any, how: str, ranks: tuple[int, ...]) -> Any:
        self.how, self.ranks = how, ranks
        return self

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        x, number = batch
        return self.spoilt(self.loss(x), int(number[0]))

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[0]))

    def loss(self: Any, x: Tensor) -> Tensor:
        is_second = type.__call__(type, self.trainer).__name__ == "View"
        fails = is_second and self.global_rank in self.ranks
        if fails and self.how == "error":
            raise ValueError("the step has a problem")
        if fails and self.how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        loss = super().loss(x)  # type: ignore[misc]
        if fails and self.how == "late error":
            raise ValueError("the step has a problem")
        if fails and self.how == "gone":
            os._exit(0)
        return Raises.apply(loss) if fails and self.how == "backward" and loss.requires_grad else loss


class FailsSharded(Fails, Regression):
    pass


class FailsInDdp(Fails, Gathers):
    pass


def fit(how: str, ranks: tuple[int, ...], timeout: float = 60, *, ddp: bool = False) -> dict[str, Any]:
    limit = timedelta(seconds=timeout)
    torch.manual_seed(0)
    module = (FailsInDdp() if ddp else FailsSharded("fsdp", {(1, 2): "nan"})).fail(how, ranks)
    initialise(module)
    loader = data(WORLD_SIZE, (), int(os.environ["LOCAL_RANK"]))
    locator = OverflowLocator()
    callbacks = [ScaleMonitor(), locator, GradientMonitor(every_n_steps=3), MetricComparison()] if how else []
    plugin: AmpPrecision = scaled()
    trainer: L.Trainer = quiet_trainer(
        plugins=[plugin],
        callbacks=callbacks,
        strategy=DDPStrategy(timeout=limit) if ddp else ModelParallelStrategy(WORLD_SIZE, 1, timeout=limit),
        devices=WORLD_SIZE,
        use_distributed_sampler=False,
        max_epochs=2,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader)
    return {
        "parameters": [p.full_tensor().clone() if hasattr(p, "full_tensor") else p.clone() for p in shards(module)],
        "counts": (plugin.num_steps, plugin.num_skipped),
        "warnings": [str(w.message) for w in caught if "lightning_amp" in str(w.filename)],
        "notes": [report.note for report in locator.reports],
    }


def shards(module: L.LightningModule) -> list[Any]:
    if isinstance(module, FailsSharded):
        module.model.reshard()  # the root stays gathered after a validation
    return [p.detach() for p in module.parameters()]


def gone() -> None:
    """End rank 1 in a second run. Rank 0 has to stop with an error, within the limit."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.save({"gone": ""}, folder() / f"rank{os.environ['RANK']}.pt")
    try:
        fit("gone", (1,), timeout=4)
    except RankMissingError as error:
        torch.save({"gone": str(error)}, folder() / f"rank{os.environ['RANK']}.pt")
    os._exit(0)


HOW = ("error", "late error", "memory", "backward")
SCENARIOS: Scenarios = {
    "nothing fails": partial(fit, "", ()),
    "ddp, nothing fails": partial(fit, "", (), ddp=True),
    "callbacks": partial(fit, "no", ()),
    **{
        f"{'ddp, ' * ddp}{how}, ranks {ranks}": partial(fit, how, ranks, timeout=60 - 40 * ddp, ddp=ddp)
        for ddp in (False, True)
        for how in HOW
        for ranks in ((1,), (0,), (0, 1))
    },
}

if __name__ == "__main__":
    if sys.argv[2:] == ["gone"]:
        gone()
    main(SCENARIOS)
