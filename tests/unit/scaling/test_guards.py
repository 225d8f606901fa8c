"""A tally decides whether all steps were skipped since its owner last moved, in memory that does not grow."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import CountReads
from torch import nn

from lightning_amp.scaling import ScaledSteps, Skip, Tally


def flag(skipped: bool) -> Skip:
    return Skip(torch.tensor(float(skipped)))


@pytest.mark.parametrize("applied", [None, 0, 70, 999])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_tally_over_many_steps(on_device: bool, applied: int | None) -> None:
    """An average may begin in the last epochs, after a million steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    tally = Tally(None, optimizer)
    with CountReads() as reads:
        for index in range(1000):
            skipped = index != applied
            tally.observe(optimizer, flag(skipped) if on_device else Skip.YES if skipped else Skip.NO)
    assert reads.count == 0
    assert len(tally.skips) <= 65
    assert all(skip.wait() for skip in tally.take()) is (applied is None)
    assert tally.take() == []


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
