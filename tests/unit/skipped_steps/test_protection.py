"""`SkipProtection` handles schedules, averages and buffers together, and restores the user's objects."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.types import LRSchedulerConfig
from support import Toy, quiet_trainer
from support.averages import WeightAveraging, needs_averages
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp.scaling import Skip, StepResult
from lightning_amp.skipped_steps import SkipProtection, matching_places


class Net(Toy):
    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.BatchNorm1d(2, momentum=0.5)))
        self.register_buffer("queue", torch.zeros(1))

    @property
    def mean(self) -> float:
        return self.net[0].running_mean[0].item()


class Fit:
    """A fit with a schedule, an average and buffers."""

    def __init__(self, module: Toy | None = None, *callbacks: L.Callback, schedule: bool = True) -> None:
        self.module: Any = module or Net()
        self.average = WeightAveraging()
        trainer = quiet_trainer(callbacks=[self.average, *callbacks] if module is None else list(callbacks))
        self.module.trainer = trainer
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        trainer.strategy.optimizers = [self.optimizer]
        self.scheduler = ExponentialLR(self.optimizer, 0.5)
        self.optimizer.step()  # torch warns of a schedule that moves before any step
        if schedule:
            trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(self.scheduler, interval="step")]
        self.protection = SkipProtection(self.module, matching_places(self.module, ["queue"] * (module is None)))

    def batch(self, skip: Skip, loss: float = 1.0, value: float = 4.0) -> tuple[float, float, float, bool]:
        """Return rate, running mean and queue after the step, and whether the average updates."""
        self.protection.enter_step()
        self.module.net(torch.full((4, 2), value))
        self.module.queue += value
        self.protection.note_backward()
        self.protection.before_step(self.optimizer)
        self.protection.observe(self.optimizer, StepResult(skip, torch.tensor(loss)))
        self.scheduler.step()
        averages = self.average.should_update(step_idx=0)
        return float(self.scheduler.get_last_lr()[0]), self.module.mean, self.module.queue.item(), averages


@needs_averages
@pytest.mark.parametrize("on_device", [False, True])
def test_nobody_notices_a_skipped_step(on_device: bool) -> None:
    no, yes = (Skip(torch.tensor(float(s))) if on_device else (Skip.NO, Skip.YES)[s] for s in (0, 1))
    fit = Fit()
    assert fit.batch(no) == (0.5, 2.0, 4.0, True)
    assert fit.batch(yes) == (0.5, 2.0, 4.0, False)
    assert fit.batch(no) == (0.25, 3.0, 8.0, True)


@needs_averages
def test_who_needs_to_know_at_once() -> None:
    fit = Fit()
    assert fit.protection.host_must_know(fit.optimizer)  # an average reads its counter on the host
    assert fit.protection.asks_for_loss
    plain = Fit(Toy())
    assert not plain.protection.host_must_know(plain.optimizer)
    assert not plain.protection.asks_for_loss


@pytest.mark.parametrize(("manual", "expected"), [(True, 2.0), (False, 5.0)])
def test_in_manual_optimization_a_forward_may_follow_a_step(manual: bool, expected: float) -> None:
    """In manual optimization a later forward of the same training step has its own copy; in automatic there is none."""
    fit = Fit()
    fit.module.automatic_optimization = not manual
    fit.protection.enter_step()
    fit.module.net(torch.full((4, 2), 4.0))
    fit.protection.note_backward()
    fit.protection.observe(fit.optimizer, StepResult(Skip.NO, None))
    fit.module.net(torch.full((4, 2), 8.0))
    fit.protection.note_backward()
    fit.protection.observe(fit.optimizer, StepResult(Skip.YES, None))
    assert fit.module.mean == expected


def test_a_checkpoint_is_mended() -> None:
    fit = Fit()
    fit.protection.enter_step()
    fit.module.net(torch.full((4, 2), float("nan")))
    fit.protection.note_backward()
    state = dict(fit.module.state_dict())
    fit.protection.mend(state)
    assert state["net.0.running_mean"].tolist() == [0.0, 0.0]


# -- averages ----------------------------------------------------------------------------------------------------------


class EveryEpochToo(WeightAveraging):
    """A user's averaging callback, which returns the arguments of `should_update`."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> Any:
        return ("step", step_idx) if step_idx is not None else ("epoch", epoch_idx)


@needs_averages
def test_an_average_is_updated_after_applied_steps_and_at_the_end_of_an_epoch() -> None:
    fit = Fit(Toy(), average := EveryEpochToo(), other := StochasticWeightAveraging(swa_lrs=0.1))
    assert average.should_update(step_idx=0) is False  # no step so far: the last one of a resumed run was skipped
    for skips, expected in ([Skip.NO], True), ([Skip.YES], False), ([Skip.YES], False), ([Skip.NO, Skip.YES], True):
        for skip in skips:
            fit.protection.observe(fit.optimizer, StepResult(skip))
        assert average.should_update(epoch_idx=3) == ("epoch", 3) or expected
        assert average.should_update(step_idx=1) == (("step", 1) if expected else False)
    assert type(other) is StochasticWeightAveraging


@needs_averages
def test_callbacks_may_come_and_go() -> None:
    """`LearningRateFinder` replaces all callbacks for a while."""
    fit = Fit()
    trainer, callbacks = fit.module.trainer, fit.module.trainer.callbacks
    trainer.callbacks = []
    fit.protection.enter_step()
    assert type(fit.average) is WeightAveraging
    assert not fit.protection.host_must_know(fit.optimizer)
    trainer.callbacks = callbacks
    fit.protection.enter_step()
    assert fit.average.should_update(step_idx=0) is False
