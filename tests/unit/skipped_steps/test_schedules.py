"""Which schedules are held, and when the host needs the flag of a skip for them."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.types import LRSchedulerConfig
from support import Poison, Toy, batches, fit, quiet_trainer
from support.promises import Plugins, fused_adamw
from torch.optim import lr_scheduler as lrs

from lightning_amp.scaling import Skip, StepResult
from lightning_amp.skipped_steps import SkipProtection


def halving(optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
    return lrs.ExponentialLR(optimizer, 0.5)


class Run:
    """A module that a Trainer has set up, with one schedule. The first rate is 1."""

    def __init__(self, module: Toy | None = None, *callbacks: L.Callback, make: Any = halving, **config: Any) -> None:
        self.module = module or Toy()
        self.trainer = self.module.trainer = quiet_trainer(callbacks=list(callbacks))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.scheduler = make(self.optimizer)
        self.optimizer.step()  # torch warns of a schedule that moves before any step
        self.trainer.strategy.optimizers = [self.optimizer]
        self.trainer.strategy.lr_scheduler_configs = [
            LRSchedulerConfig(self.scheduler, **{"interval": "step", **config})
        ]
        self.held = SkipProtection(self.module)

    def step(self, *skips: Skip) -> float:
        """Attempt steps, then step the schedule. Return the rate as a callback would read it."""
        for skip in skips:
            self.held.observe(self.optimizer, StepResult(skip))
        self.scheduler.step()
        return self.rate

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


def test_a_schedule_that_comes_during_a_fit_is_held_too() -> None:
    run = Run()
    config = run.trainer.strategy.lr_scheduler_configs[0]
    config.scheduler = run.scheduler = halving(run.optimizer)
    run.held.enter_step()
    run.held.enter_step()
    before = run.rate
    assert run.step(Skip.YES) == before


class SeesRates(L.Callback):
    def on_train_batch_end(self, *args: Any) -> None: ...


class OwnSchedulerStep(Toy):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@pytest.mark.parametrize(
    ("module", "callbacks", "expected"),
    [(Toy, [], False), (Toy, [LearningRateMonitor], True), (Toy, [SeesRates], True), (Toy, [L.Callback], False),
     (OwnSchedulerStep, [], True)],
)  # fmt: skip
def test_whether_the_host_must_know(module: type[Toy], callbacks: list[type[L.Callback]], expected: bool) -> None:
    run = Run(module(), *(make() for make in callbacks))
    assert run.held.host_must_know(run.optimizer) is expected
    if module is Toy:  # the hook exists in automatic optimization only, which has one optimizer
        assert not run.held.host_must_know(torch.optim.SGD(run.module.parameters(), lr=1.0))


def test_afterwards_all_is_decided_and_as_it_was() -> None:
    run = Run(OwnSchedulerStep())
    assert "lr_scheduler_step" in vars(run.module)
    assert type(run.module) is OwnSchedulerStep  # copies of modules go by their class
    run.step(Skip(torch.tensor(0.0)))
    run.held.detach()
    assert (run.rate, type(run.scheduler)) == (0.5, lrs.ExponentialLR)
    assert "lr_scheduler_step" not in vars(run.module)
    assert not run.held.host_must_know(run.optimizer)
    assert run.step() == 0.25


# -- in a Trainer ------------------------------------------------------------------------------------------------------


def rate(trainer: L.Trainer) -> list[float]:
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.usefixtures("where_flags_live")
def test_rates_that_somebody_watches_are_decided_at_once() -> None:
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append(rate(trainer)[0])

    module = functools.partial(Toy, fused_adamw, None, halving)
    fit(module, Plugins(True).scaled(), batches(4), callbacks=[Poison(gradient=[1]), Watch()])
    assert seen == pytest.approx([0.005, 0.005, 0.0025, 0.00125])


@pytest.mark.usefixtures("where_flags_live")
def test_lr_monitor_shows_the_rate_that_is_used(tmp_path: Any) -> None:
    from lightning.pytorch.loggers import CSVLogger

    module = functools.partial(Toy, fused_adamw, None, halving)
    logger = CSVLogger(tmp_path)
    poison = Poison(gradient=[1])
    fit(module, Plugins(True).scaled(), batches(4), logger=logger, callbacks=[poison, LearningRateMonitor()])
    rates = [float(row["lr-AdamW"]) for row in logger.experiment.metrics if "lr-AdamW" in row]
    assert not rates or rates == pytest.approx([0.01, 0.005, 0.005, 0.0025])
    assert "lr-AdamW" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
