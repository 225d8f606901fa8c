"""Calls are held if all steps since the last call that ran were skipped. What the device knows is decided later."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from support import CountReads
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp.scaling import Hold, ScaledSteps, Skip


class Counter:
    def __init__(self) -> None:
        self.updates = 0

    def update(self) -> None:
        self.updates += 1


def flag(skipped: bool, on_device: bool = True) -> Skip:
    return Skip(torch.tensor(float(skipped))) if on_device else Skip.YES if skipped else Skip.NO


@pytest.mark.parametrize("on_device", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("skipped", list(itertools.product([False, True], repeat=2)))
def test_one_applied_step_is_enough(skipped: tuple[bool, bool], on_device: tuple[bool, bool]) -> None:
    counter = Counter()
    hold = Hold(counter, ["update"])
    with CountReads() as reads:
        for skip, where in zip(skipped, on_device, strict=True):
            hold.observe(None, flag(skip, where))
    assert reads.count == 0
    counter.update()
    assert counter.updates == (not all(skipped))
    counter.update()  # it is held until a step is applied; a call after no step runs
    assert counter.updates == (0 if all(skipped) else 2)
    hold.observe(None, flag(False))
    counter.update()
    assert counter.updates == (1 if all(skipped) else 3)


def test_what_happens_instead() -> None:
    counter = Counter()
    hold = Hold(counter, ["update"], lambda call: (call.__self__, call()))
    hold.observe(None, Skip.YES)
    assert counter.update() == (counter, None)
    assert counter.updates == 1


class Schedule:
    """A held schedule. Its first rate is 1."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        self.scheduler = ExponentialLR(self.optimizer, 0.5)
        self.optimizer.step()  # torch warns of a schedule that moves before any step
        self.hold = Hold(self.scheduler, ["step"])

    def step(self, *skips: Skip) -> float:
        """Attempt steps, then step the schedule. Return the rate as a callback would read it."""
        for skip in skips:
            self.hold.observe(self.optimizer, skip)
        self.scheduler.step()
        return self.rate

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


def test_steps_of_other_optimizers_do_not_count() -> None:
    schedule = Schedule()
    schedule.hold.observe(Schedule().optimizer, Skip.YES)
    assert schedule.step() == 0.5


READERS = {
    "resolve": lambda schedule: schedule.hold.resolve(),
    "get_last_lr": lambda schedule: schedule.scheduler.get_last_lr(),
    "state_dict": lambda schedule: schedule.scheduler.state_dict(),
    "optimizer.state_dict": lambda schedule: schedule.optimizer.state_dict(),
    "copy": lambda schedule: copy.copy(schedule.scheduler),
    "close": lambda schedule: schedule.hold.close(),
}


@pytest.mark.parametrize(("skipped", "expected"), [(True, 1.0), (False, 0.5)])
@pytest.mark.parametrize("reader", READERS)
def test_what_the_device_knows_is_decided_when_code_reads_the_rate(reader: str, skipped: bool, expected: float) -> None:
    schedule = Schedule()
    with CountReads() as reads:
        assert schedule.step(flag(True), flag(skipped)) == 1.0
    assert reads.count == 0
    READERS[reader](schedule)
    assert schedule.rate == expected


class WithSlots:
    __slots__ = ("updates",)

    def __init__(self) -> None:
        self.updates = 0

    def update(self) -> None:
        self.updates += 1


class WithAState:
    """Its attributes alone cannot be pickled."""

    def __init__(self) -> None:
        self.updates, self.hook = 0, lambda: None

    def update(self) -> None:
        self.updates += 1

    def __getstate__(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


@pytest.mark.parametrize("kind", [WithSlots, WithAState])
def test_any_average_can_be_guarded_copied_and_pickled(kind: Any) -> None:
    average = ScaledSteps().guard(kind(), "update")
    average.update()
    for other in (copy.copy(average), copy.deepcopy(average), pickle.loads(pickle.dumps(average))):
        assert type(other) is kind
        assert other.updates == 1
