"""Averaged weights are updated only if a step was applied since the last update."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from support.averages import WeightAveraging, needs_averages

from lightning_amp.scaling import Skip
from lightning_amp.skipped_steps._averages import HeldAverages

pytestmark = needs_averages


class EveryEpochToo(WeightAveraging):
    """A user's averaging callback, which returns the arguments of `should_update`."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> Any:
        return ("step", step_idx) if step_idx is not None else ("epoch", epoch_idx)


def holding(callbacks: list[Any]) -> HeldAverages:
    held = HeldAverages(callbacks)
    held.attach()
    return held


@pytest.fixture
def average() -> WeightAveraging:
    return EveryEpochToo()


def test_a_step_is_averaged_once_and_a_skipped_one_never(average: WeightAveraging) -> None:
    held = holding([average])
    assert average.should_update(step_idx=0) is False
    held.observe(Skip.NO)
    assert average.should_update(step_idx=1) == ("step", 1)
    assert average.should_update(step_idx=1) is False
    held.observe(Skip.YES)
    assert average.should_update(step_idx=2) is False
    held.observe(Skip(torch.tensor(0.0)))
    held.observe(Skip.YES)  # one of the two was applied
    assert average.should_update(step_idx=4) == ("step", 4)


def test_each_average_counts_for_itself(average: WeightAveraging) -> None:
    held = holding([average, other := WeightAveraging()])
    held.observe(Skip.NO)
    assert average.should_update(step_idx=0) == ("step", 0)
    assert other.should_update(step_idx=0) is True
    assert other.should_update(step_idx=0) is False


def test_the_end_of_an_epoch_is_no_step(average: WeightAveraging) -> None:
    holding([average])
    assert average.should_update(epoch_idx=0) == ("epoch", 0)


def test_other_callbacks_are_left_alone() -> None:
    others = [ModelCheckpoint(), StochasticWeightAveraging(swa_lrs=0.1)]
    held = holding(list(others))
    assert not held
    assert [type(c) for c in others] == [ModelCheckpoint, StochasticWeightAveraging]


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_plain(average: WeightAveraging, how: Any) -> None:
    held = holding([average])
    assert isinstance(average, EveryEpochToo)
    copied = how(average)
    assert type(copied) is EveryEpochToo
    assert copied.should_update(step_idx=0) == ("step", 0)
    assert held
    assert average.should_update(step_idx=0) is False


def test_afterwards_they_are_as_they_were(average: WeightAveraging) -> None:
    held = holding([average])
    held.detach()
    held.detach()
    assert type(average) is EveryEpochToo
    assert average.should_update(step_idx=0) == ("step", 0)
    assert not held


@pytest.mark.parametrize("derives", [False, True])
def test_a_class_that_somebody_else_gives_a_callback_stays(average: WeightAveraging, derives: bool) -> None:
    held = holding([average])
    theirs = type("Theirs", (type(average) if derives else EveryEpochToo,), {})
    average.__class__ = theirs
    held.detach()
    assert type(average) is theirs
    assert average.should_update(step_idx=1)
    assert average.should_update(step_idx=2)
