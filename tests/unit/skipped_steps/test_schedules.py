"""`scheduler.step()` is held if all steps since the last one were skipped. On a device it is decided later."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.types import LRSchedulerConfig
from support import CountReads, Poison, Toy, batches, fit, quiet_trainer
from support.promises import Plugins, fused_adamw, plain_adamw
from torch.optim import lr_scheduler as lrs

from lightning_amp.scaling import Skip
from lightning_amp.skipped_steps._schedules import HeldSchedules


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
        self.held = HeldSchedules(self.module)
        self.held.attach()

    def step(self, *skips: Skip) -> float:
        """Attempt steps, then step the schedule. Return the rate as a callback would read it."""
        for skip in skips:
            self.held.observe(self.optimizer, skip)
        self.scheduler.step()
        return self.rate

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


def later(skipped: bool) -> Skip:
    return Skip(torch.tensor(float(skipped)))


def test_it_is_held_where_all_steps_were_skipped() -> None:
    run = Run()
    assert run.step(Skip.YES) == 1.0
    assert run.step(Skip.YES, Skip.YES) == 1.0
    assert run.step(Skip.YES, Skip.NO) == 0.5
    assert run.step() == 0.25  # once per epoch: without a step in between nothing is held
    assert run.scheduler.last_epoch == 2


def test_another_optimizers_steps_do_not_count() -> None:
    run = Run()
    run.held.observe(torch.optim.SGD(run.module.parameters(), lr=1.0), Skip.YES)
    assert run.step() == 0.5


@pytest.mark.parametrize(("skipped", "expected"), [(True, 1.0), (False, 0.5)])
@pytest.mark.parametrize("ask", ["before_step", "get_last_lr", "state_dict", "optimizer.state_dict", "copy"])
def test_what_the_device_knows_is_decided_when_somebody_needs_the_rate(
    ask: str, skipped: bool, expected: float
) -> None:
    run = Run()
    with CountReads() as reads:
        assert run.step(later(True), later(skipped)) == 1.0
    assert reads.count == 0
    {
        "before_step": lambda: run.held.before_step(run.optimizer),
        "get_last_lr": run.scheduler.get_last_lr,
        "state_dict": run.scheduler.state_dict,
        "optimizer.state_dict": run.optimizer.state_dict,
        "copy": lambda: copy.copy(run.scheduler),
    }[ask]()
    assert run.rate == expected


def test_one_step_that_the_host_knows_to_be_taken_is_enough() -> None:
    assert Run().step(later(True), Skip.NO) == 0.5


def test_two_steps_of_the_schedule_in_a_row_are_both_decided() -> None:
    run = Run()
    run.step(later(False))
    assert run.step(later(False)) == 0.5  # the first schedule step
    run.held.before_step(run.optimizer)
    assert run.rate == 0.25


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "per epoch": (halving, {"interval": "epoch"}),
    "plateau": (lambda o: lrs.ReduceLROnPlateau(o, patience=0), {"reduce_on_plateau": True}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_run_as_ever(kind: str) -> None:
    make, config = OTHERS[kind]
    run = Run(make=make, **config)
    assert not run.held
    assert type(run.scheduler) in (lrs.ExponentialLR, lrs.ReduceLROnPlateau)


def test_in_manual_optimization_the_interval_says_nothing() -> None:
    module = Toy()
    module.automatic_optimization = False
    assert Run(module, interval="epoch").step(Skip.YES) == 1.0


def test_a_schedule_that_comes_during_a_fit_is_held_too() -> None:
    run = Run()
    config = run.trainer.strategy.lr_scheduler_configs[0]
    config.scheduler = run.scheduler = halving(run.optimizer)
    run.held.attach()
    run.held.attach()
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
    assert not run.held.host_must_know(torch.optim.SGD(run.module.parameters(), lr=1.0))


def test_afterwards_all_is_decided_and_as_it_was() -> None:
    run = Run(OwnSchedulerStep())
    assert "lr_scheduler_step" in vars(run.module)
    run.step(later(False))
    run.held.detach()
    assert (run.rate, type(run.scheduler)) == (0.5, lrs.ExponentialLR)
    assert not run.optimizer._optimizer_state_dict_pre_hooks
    assert "lr_scheduler_step" not in vars(run.module)
    assert not run.held
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
def test_gated_schedulers_copy_and_pickle_as_themselves() -> None:
    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            scheduler = trainer.lr_scheduler_configs[0].scheduler
            self.copies = [copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))]
            assert isinstance(scheduler, lrs.ExponentialLR)

    callback = Copy()
    fit(functools.partial(Toy, plain_adamw, None, halving), Plugins(True).scaled(), batches(2), callbacks=[callback])
    assert [type(c) for c in callback.copies] == [lrs.ExponentialLR] * 2
    assert [c.last_epoch for c in callback.copies] == [2, 2]


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


class Doubled(lrs.ExponentialLR):
    """A class that somebody else gives the scheduler."""

    def step(self, epoch: Any = None) -> None:
        super().step()
        super().step()


@pytest.mark.parametrize("derives", [False, True])
def test_a_class_that_somebody_else_gives_a_scheduler_stays(derives: bool) -> None:
    run = Run()
    run.step(later(False))  # on a device, so not decided yet
    theirs = type("Theirs", (type(run.scheduler),), {}) if derives else Doubled
    run.scheduler.__class__ = theirs
    run.held.detach()
    assert type(run.scheduler) is theirs
    assert run.rate == 0.5  # the step that was noted
    assert run.step(later(True)) == (0.25 if derives else 0.125)  # it is not held any more
