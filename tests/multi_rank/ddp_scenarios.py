"""Trouble on one of two gloo ranks, in every kind of loop that DDP allows. `test_ddp.py` runs this script.

Every scenario trains twice, with the bad batches and from a dataset without them, and reports both.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from multi_rank import ranks
from multi_rank.ranks import (
    BAD,
    EVERY_KIND,
    FEATURES,
    FIRST_WINDOWS,
    WINDOWS,
    Infinite,
    Scenarios,
    Trouble,
    Troubled,
    data,
    folder,
    fused,
    initialise,
    plain,
    scaled,
)
from support import DEVICE, ForbidSync, WithoutAutocast, machines, quiet_trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor, OverflowLocator
from lightning_amp.scaling import OptimizerSteps, RecordLog, StepPlan


class Net(Troubled):
    """A module with BatchNorm, unless told otherwise."""

    def __init__(self, trouble: Trouble | None = None, optimizer: Any = None, norm: bool = True) -> None:
        super().__init__(trouble, optimizer)
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh(), nn.Linear(16, 8)
        )
        self.head = nn.Linear(8, 1)


def train(
    module: L.LightningModule,
    without: tuple[int, ...] = (),
    plugin: AmpPrecision | None = None,
    world_size: int = 2,
    strategy: dict[str, Any] | None = None,
    fresh: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train from a seed; return the values to compare."""
    if fresh:
        initialise(module)
    ddp = partial(DDPStrategy, **(strategy or {}))
    return ranks.train(module, data(world_size, without), plugin, ddp, world_size, **kwargs)[1]


def both(make: Any, trouble: Trouble = EVERY_KIND, bad: tuple[int, ...] = BAD, **kwargs: Any) -> Any:
    """Train with trouble, and from a dataset without the bad batches; `make` gets the trouble."""
    plugin = kwargs.pop("plugin", scaled)
    return {
        "with": train(make(trouble), plugin=plugin(), **kwargs),
        "without": train(make({}), bad, plugin=plugin(), **kwargs),
    }


def net(optimizer: Any = fused, kind: type[Net] = Net, **kwargs: Any) -> Any:
    return lambda trouble: kind(trouble, optimizer, **kwargs)


SCENARIOS: Scenarios = {}


def scenario(function: Any) -> Any:
    SCENARIOS[function.__name__] = function
    return function


SCENARIOS.update({
    "every_kind_unfused": lambda: both(Net, gradient_clip_val=0.5),
    "every_kind_fused": lambda: both(net(), gradient_clip_val=0.5),
    "every_kind_bf16": lambda: both(
        net(), plugin=lambda: scaled("bf16"), gradient_clip_val=0.1, gradient_clip_algorithm="value"
    ),
    "static_graph": lambda: both(net(norm=False), strategy={"static_graph": True}, gradient_clip_val=0.5),
    "bucket_views": lambda: both(Net, strategy={"gradient_as_bucket_view": True}, gradient_clip_val=0.5),
    # trouble in unsynchronised micro-batches of different ranks at different times: the whole window is skipped
    "accumulation": lambda: both(net(), WINDOWS, FIRST_WINDOWS, accumulate_grad_batches=3),
    "accumulation_unfused": lambda: both(
        Net, {(1, 3): "inf", (0, 7): "gradient", (1, 8): "gradient"}, (3, 4, 5, 6, 7, 8),
        accumulate_grad_batches=3, gradient_clip_val=0.5,
    ),
    # half precision takes part, so the run without bad batches may differ by rounding
    "autocast_fp16": lambda: {
        "with": train(Net(EVERY_KIND), plugin=AmpPrecision("fp16", scaler=DynamicLossScaler(1024.0)))
    },
    "autocast_bf16": lambda: {
        "with": train(Net(EVERY_KIND, fused), plugin=AmpPrecision("bf16"), gradient_clip_val=0.5)
    },
})  # fmt: skip


@scenario
def infinite_losses_with_finite_gradients() -> Any:
    """A closure's calls count as one step; all ranks look for the cause together, once."""
    trouble: Trouble = {(1, 1): "detached", (0, 4): "detached", (1, 4): "detached"}
    locator = OverflowLocator()
    return {
        "with": train(Net(trouble, fused), callbacks=[locator], gradient_clip_val=0.5),
        "without": train(Net({}, fused), gradient_clip_val=0.5),
        "reports": [(r.record.index, r.rank, r.cause, r.record.skipped) for r in locator.reports],
    }


class Mending(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


@scenario
def mended_gradients() -> Any:
    """Both ranks take the step, as without any guard; an overflow still lowers the scale on both."""
    plain = AmpPrecision("fp32", skip_nonfinite=False)
    return {
        "with": train(Mending(EVERY_KIND, fused, norm=False)),
        "without": train(Mending(EVERY_KIND, fused, norm=False), plugin=plain),
    }


class Unscaling(Net):
    """Mend after `unscale_`, which is too late. Without synchronisation only one rank has seen the fault."""

    def on_after_backward(self) -> None:
        self.trainer.precision_plugin.unscale_(self.optimizers())
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(1.0, 1.0, -1.0)


SCENARIOS["mended_after_unscale"] = lambda: both(net(kind=Unscaling), WINDOWS, FIRST_WINDOWS, accumulate_grad_batches=3)


class Unused(Net):
    """Rank 1 does not use the head in odd batches; no rank uses it in batches 0 and 7."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, number = batch
        n = int(number[0])
        if n in (0, 7) or (self.global_rank == 1 and n % 2):
            return self.spoilt(self.body(x).float().pow(2).mean(), n)
        return self.spoilt(self.loss(x), n)


SCENARIOS["unused_parameters"] = lambda: both(net(kind=Unused), strategy={"find_unused_parameters": True})


class Pair(Net):
    """Two optimizers by hand; only the second one's loss becomes non-finite."""

    def __init__(self, trouble: Trouble, optimizer: Any, order: str) -> None:
        super().__init__(trouble, optimizer, norm=False)
        self.automatic_optimization = False
        self.order = order

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, number = batch
        n = int(number[0])
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        body = self.body(x).float()
        self.manual_backward(body.pow(2).mean())
        if self.order == "bsbs":
            self.clip_gradients(first, 0.5, "norm")
            first.step()
            second.zero_grad()
        loss = self.spoilt((self.head(body.detach()) - 1).float().pow(2).mean(), n)
        self.manual_backward(loss)
        if self.order == "bbss":
            self.clip_gradients(first, 0.5, "norm")
            first.step()
        second.step()
        for schedule in self.lr_schedulers() or ():
            schedule.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizers = [self.make_optimizer(module.parameters()) for module in (self.body, self.head)]
        return optimizers, [ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


class NeverSecond(Pair):
    """The result that both orders must equal: the bad batches never reach the second optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if int(batch[1][0]) not in BAD:
            return super().training_step(batch, batch_idx)
        first = self.optimizers()[0]
        first.zero_grad()
        self.manual_backward(self.body(batch[0]).float().pow(2).mean())
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.lr_schedulers()[0].step()
        return None


def _pair(order: str, make: Any) -> Any:
    options: dict[str, Any] = {"strategy": {"find_unused_parameters": True}}
    reference = train(NeverSecond({}, make, order), plugin=scaled(), **options)
    return {"with": train(Pair(EVERY_KIND, make, order), plugin=scaled(), **options), "without": reference}


SCENARIOS.update(
    {
        "manual_bsbs_fused": lambda: _pair("bsbs", fused),
        "manual_bsbs_unfused": lambda: _pair("bsbs", plain),
        "manual_bbss_fused": lambda: _pair("bbss", fused),
        "manual_bbss_unfused": lambda: _pair("bbss", partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    }
)


class SecondCall(Net):
    """LBFGS; the loss of some closure calls is not finite on one rank."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(
            trouble,
            lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0),
            norm=False,
        )
        self.calls: dict[int, int] = {}

    def spoilt(self, loss: Tensor, number: int) -> Tensor:
        self.calls[number] = self.calls.get(number, 0) + 1
        return super().spoilt(loss, number) if self.calls[number] == 2 else loss


SCENARIOS["lbfgs"] = lambda: both(SecondCall)


@scenario
def no_gradients_on_one_rank() -> Any:
    """Only rank 0 has gradients. In step 2 no rank has any. In step 3 the loss of the other rank is NaN. In step 5 it
    is NaN again, and the gradients overflow.
    """
    log, scaler = RecordLog(), DynamicLossScaler(1024.0, growth_interval=2, device=DEVICE)
    rank = torch.distributed.get_rank()
    device = torch.device(DEVICE, rank if DEVICE == "cuda" else None)
    all_reduce_max = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX)
    weight, other = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    steps = OptimizerSteps(scaler, True, log, [optimizer], all_reduce_max=all_reduce_max, device=device)
    scales: list[float] = []
    for i in range(6):
        used = weight if rank == 0 and i != 2 else other
        loss = used.sum() + (torch.nan if i in (3, 5) and rank == 1 else 0.0)
        if i == 5 and rank == 0:
            loss = Infinite.apply(loss)

        def closure(loss: Tensor = loss) -> None:
            optimizer.zero_grad()
            scaled = steps.scale_loss(loss)
            with steps.scaled_backward():
                scaled.backward()

        steps.step(optimizer, closure, lambda: None, StepPlan(fold=True))
        steps.end_round()
        scales.append(scaler.get_scale())
    log.flush()
    return {
        "scales": scales,
        "tracker": scaler.state_dict()["_growth_tracker"],
        "counts": (log.num_steps, log.num_skipped),
        "weight": weight.tolist(),
    }


class Replayed(Net):
    """The module overflows in its own forward: in batch 1 on rank 1, in batch 3 on both, and in an unsynchronised
    micro-batch.
    """

    def __init__(self, unrepeatable: bool = False) -> None:
        super().__init__(norm=False)
        self.unrepeatable = unrepeatable

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, number = batch
        n = int(number[0])
        if self.unrepeatable and self.global_rank == 1 and type(self.trainer) is not L.Trainer:
            raise RuntimeError("only once")
        if (self.global_rank, n) in {(1, 1), (0, 3), (1, 3)}:
            x = x * 1e38 * 1e38
        return self.loss(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(1 + 99 * self.global_rank)  # rank 1 has larger gradients


def _with_callbacks(*callbacks: L.Callback, unrepeatable: bool = False, **kwargs: Any) -> dict[str, Any]:
    return train(Replayed(unrepeatable), callbacks=callbacks, **kwargs)


def fp16() -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(16.0))


@scenario
def overflow_reports() -> Any:
    """Rank 0 writes and logs for all ranks; the run equals one without callbacks."""
    printed = io.StringIO()
    locator = OverflowLocator(dirpath=folder() / "overflows")
    logger = logging.getLogger("lightning_amp.callbacks._overflow_locator")
    handler = logging.StreamHandler(printed)
    logger.addHandler(handler)
    try:
        seen = _with_callbacks(locator)
    finally:
        logger.removeHandler(handler)
    return {
        "with": seen,
        "without": _with_callbacks(),
        "reports": [(r.record.index, r.rank, r.cause, r.batch_idx) for r in locator.reports],
        "said": printed.getvalue(),
    }


class Contrastive(Net):
    """The training step communicates with the other ranks."""

    def loss(self, x: Tensor) -> Tensor:
        features = self.body(x).float()
        everybodys = self.all_gather(features, sync_grads=True).flatten(0, 1)
        return (features @ everybodys.T).logsumexp(1).mean() + super().loss(x)


@scenario
def overflow_reports_of_a_step_with_collectives() -> Any:
    """Only one rank finds a cause, in the first batch of the window."""
    locator = OverflowLocator()
    trouble = {(1, 0): "head", (1, 5): "gradient"}
    module = Contrastive(trouble, norm=False)
    seen = train(module, callbacks=[locator, GradientMonitor(1)], accumulate_grad_batches=2)
    return {
        "with": seen,
        "without": train(Contrastive(norm=False), (0, 1, 4, 5), accumulate_grad_batches=2),
        "reports": [(r.record.index, r.rank, r.cause, r.batch_idx) for r in locator.reports],
    }


@scenario
def gradient_figures() -> Any:
    """Compare the report of both ranks together with the report of each alone in one process.

    Then one rank cannot run its step again. The first batch is used, because all ranks have the same weights there.
    """
    with mock.patch.object(GradientMonitor, "_is_settled", return_value=True):
        return _gradient_figures()


def _gradient_figures() -> Any:
    monitor, broken = GradientMonitor(100), GradientMonitor(100)
    seen = _with_callbacks(monitor, plugin=fp16())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _with_callbacks(broken, unrepeatable=True, max_steps=1)
    alone = GradientMonitor(100)
    rank = torch.distributed.get_rank()

    class Alone(Replayed):
        global_rank = rank  # pyright: ignore[reportAssignmentType]

    module = Alone()
    initialise(module)
    trainer = quiet_trainer(plugins=[fp16()], callbacks=[alone], max_steps=1)
    trainer.fit(module, data(2))
    return {
        "with": seen,
        "without": _with_callbacks(plugin=fp16()),
        "rows": [row._asdict() for row in monitor.table if row.step == 0],
        "alone": [row._asdict() for row in alone.table if row.step == 0],
        "broken": [row._asdict() for row in broken.table if row.step == 0],
        "warned": [str(w.message) for w in caught if "GradientMonitor" in str(w.message)],
    }


@scenario
def stuck() -> Any:
    """All ranks raise the error, and print the last report with it."""
    scaler = DynamicLossScaler(1024.0, min_scale=1024.0, max_consecutive_skips=2)
    locator, plugin = OverflowLocator(), WithoutAutocast("fp16", scaler=scaler)
    message = ""
    try:
        train(Net({(1, 1): "gradient", (0, 2): "nan"}), plugin=plugin, callbacks=[locator])
    except FloatingPointError as error:
        message = str(error)
    return {"message": message, "reports": [(r.record.index, r.rank, r.cause) for r in locator.reports]}


class Save(L.Callback):
    """Train from a checkpoint after the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@scenario
def half_parameters() -> Any:
    """Train a module that was loaded in bfloat16: two epochs, the second again from a checkpoint, and one run in
    float32.
    """
    path = folder() / "half_parameters.ckpt"

    def run(half: bool, **kwargs: Any) -> dict[str, Any]:
        module = Net(optimizer=fused)
        initialise(module.to(torch.bfloat16))
        module = module if half else module.float()
        return train(module, plugin=AmpPrecision("bf16", upcast_parameters=half), fresh=False, max_epochs=2, **kwargs)

    return {"whole": run(True, callbacks=[Save(path)]), "resumed": run(True, ckpt_path=path), "float32": run(False)}


@scenario
def auto() -> Any:
    """The ranks would choose differently, as if their machines differed."""
    rank = int(os.environ["RANK"])
    machines.move_to("bf16-slow" if rank == 0 else "bf16-fast")
    plugin = AmpPrecision("auto", eval_precision="auto")
    found = train(Net({}), plugin=plugin)
    machines.move_to("real")
    return {"precision": plugin.precision, "precisions": found["precisions"]}


class Silent(Net):
    """The host reads nothing of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])

    def configure_optimizers(self) -> Any:
        return fused(self.parameters())


def never_waits() -> Any:
    return {
        "with": train(Silent(), callbacks=[ForbidSync(first=4)], gradient_clip_val=0.5),
        "without": train(Silent(), gradient_clip_val=0.5),
    }


if DEVICE == "cuda":  # statistics over both ranks: torch supports them on CUDA only
    SCENARIOS.update({"sync_batch_norm": lambda: both(net(), sync_batchnorm=True), "never_waits": never_waits})


if __name__ == "__main__":
    ranks.main(SCENARIOS)
