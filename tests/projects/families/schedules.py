# pyright: reportMissingImports=false
"""Learning-rate schedules, torch's and other people's; what the rates were in each batch is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from projects import Setup, project
from projects.families.tutorials import Classifier, vectors

STEP: dict[str, tuple[str, Callable[[torch.optim.Optimizer], Any]]] = {
    "one_cycle": ("OneCycleLR, which also changes the momentum.", lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20)),
    "cosine": ("CosineAnnealingLR per step.", lambda o: lrs.CosineAnnealingLR(o, 12)),
    "warm_restarts": ("CosineAnnealingWarmRestarts.", lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2)),
    "cyclic": ("CyclicLR without momentum.", lambda o: lrs.CyclicLR(o, 1e-3, 1e-1, 3, cycle_momentum=False)),
    "lambda": (
        "LambdaLR with the inverse square root after a warm-up.",
        lambda o: LambdaLR(o, lambda s: min((s + 1) / 4, (s + 1) ** -0.5)),
    ),
    "polynomial": ("PolynomialLR.", lambda o: lrs.PolynomialLR(o, 10, 2.0)),
    "multi_step": ("MultiStepLR per step.", lambda o: lrs.MultiStepLR(o, [2, 4])),
    "chained": (
        "ChainedScheduler.",
        lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)]),
    ),
    "sequential": (
        "Warm-up and then cosine by SequentialLR.",
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1.0, 3), lrs.CosineAnnealingLR(o, 9)], [3]),
    ),
}


class Scheduled(Classifier):
    """SGD and a schedule; `config` is the rest of Lightning's dictionary."""

    def __init__(self, make_schedule: Callable[[torch.optim.Optimizer], Any], **config: Any) -> None:
        super().__init__()
        self.make_schedule = make_schedule
        self.config = config

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_schedule(optimizer), "interval": "step", **self.config},
        }


def schedules(**settings: Any) -> Any:
    return project("schedules", **settings)


def scheduled(make: Callable[[torch.optim.Optimizer], Any], epochs: int = 2, **config: Any) -> Setup:
    trainer = {"max_epochs": epochs, "gradient_clip_val": 1.0}
    return Setup(Scheduled(make, **config), vectors(24), vectors(16), trainer=trainer)


def add(name: str, what: str, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    @schedules(name=f"schedule_{name}", what=what, quick=name == "one_cycle")
    def with_it() -> Setup:
        return scheduled(make)


for _name, (_what, _make) in STEP.items():
    add(_name, _what, _make)


@schedules()
def schedule_plateau() -> Setup:
    """ReduceLROnPlateau on the validation loss, patience 0."""
    return scheduled(
        lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=0.5), epochs=4, interval="epoch", monitor="val_loss"
    )


@schedules()
def schedule_plateau_in_steps() -> Setup:
    """ReduceLROnPlateau every second step, on the training loss."""
    return scheduled(
        lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=0.5), frequency=2, monitor="train_loss", strict=False
    )


@schedules(quick=True)
def schedule_of_epochs() -> Setup:
    """StepLR per epoch, accumulation over two batches."""
    setup = scheduled(lambda o: lrs.StepLR(o, 1), epochs=3, interval="epoch")
    return Setup(setup.module, setup.train, setup.val, trainer={**setup.trainer, "accumulate_grad_batches": 2})


@schedules()
def schedule_by_hand() -> Setup:
    """Warm-up by hand in `optimizer_step`, as in Lightning's documentation, from `trainer.global_step`."""

    class ByHand(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            optimizer.step(closure=closure)
            scale = min(1.0, (self.trainer.global_step + 1) / 6)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.05

    return Setup(ByHand(lambda p: torch.optim.SGD(p, lr=1e-3)), vectors(), vectors(16))


@schedules()
def schedule_with_own_step() -> Setup:
    """A custom schedule class, stepped by an override of `lr_scheduler_step` that counts from 0."""

    class Halving:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.count = optimizer, 0

        def step_update(self, num_updates: int) -> None:
            self.count = num_updates
            for group in self.optimizer.param_groups:
                group["lr"] = 0.05 * 0.5**num_updates

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    class Own(Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step_update(scheduler.count + 1)

    return Setup(Own(Halving), vectors(), vectors(16))


@schedules(quick=True)
def schedule_manual() -> Setup:
    """Manual optimization that steps its schedule itself, in each batch and at the end of the epoch."""

    class Manual(Scheduled):
        def __init__(self) -> None:
            super().__init__(lambda o: lrs.ExponentialLR(o, 0.9))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
            self.log("train_loss", loss)

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step()

    return Setup(Manual(), vectors(24), vectors(16), trainer={"max_epochs": 2})


@schedules()
def schedule_of_weight_decay() -> Setup:
    """A cosine schedule of the weight decay in a hook, together with a schedule of the learning rate."""

    class Decay(Scheduled):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1 / (1 + self.global_step)

    return Setup(Decay(lambda o: lrs.LinearLR(o, 0.2, 1.0, 4)), vectors(), vectors(16))


@schedules(needs=("transformers",))
def schedule_transformers_cosine() -> Setup:
    """`get_cosine_schedule_with_warmup` of transformers."""
    from transformers import get_cosine_schedule_with_warmup

    return scheduled(lambda o: get_cosine_schedule_with_warmup(o, 2, 6))


@schedules(needs=("pytorch_optimizer.CosineAnnealingWarmupRestarts",))
def schedule_pytorch_optimizer() -> Setup:
    """`CosineAnnealingWarmupRestarts` of pytorch_optimizer."""
    from pytorch_optimizer import CosineAnnealingWarmupRestarts

    return scheduled(
        lambda o: CosineAnnealingWarmupRestarts(o, first_cycle_steps=4, max_lr=0.1, min_lr=1e-3, warmup_steps=2)
    )


@schedules(needs=("timm.scheduler",))
def schedule_timm() -> Setup:
    """timm's cosine, stepped by `step_update` in `lr_scheduler_step`."""
    from timm.scheduler import CosineLRScheduler

    class Timm(Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step_update(num_updates=self.global_step)

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return CosineLRScheduler(optimizer, t_initial=6, warmup_t=2, warmup_lr_init=1e-3, t_in_epochs=False)

    return Setup(Timm(make), vectors(), vectors(16))
