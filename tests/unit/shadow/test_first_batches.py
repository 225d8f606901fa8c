"""The first batches of an evaluation are kept, and the logged values of each batch are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp.shadow import _first_batches
from lightning_amp.shadow._first_batches import FirstBatches


def trainer(**values: tuple[float, int]) -> Any:
    """Make a trainer that has logged means, given as sum and number of rows."""
    results: dict[str, Any] = {
        name: SimpleNamespace(
            has_reset=False, is_tensor=True, value=torch.tensor(total), cumulated_batch_size=torch.tensor(rows),
            meta=SimpleNamespace(on_epoch=True, dataloader_idx=None, is_mean_reduction=True, is_sum_reduction=False),
        )
        for name, (total, rows) in values.items()
    }  # fmt: skip

    class Results(dict[str, Any]):
        def _forked_name(self, item: Any, on_step: bool) -> tuple[str]:
            return (next(name for name, one in self.items() if one is item),)

    return SimpleNamespace(_results=Results(results))


def test_values_of_each_batch_come_from_sums() -> None:
    batches = FirstBatches("cpu", 1)
    for i, (amp, fp32) in enumerate([(2.0, 2.0), (5.0, 4.0), (float("nan"), 6.0)]):
        batches.add(torch.ones(4, 2), i, None)
        batches.note_sums(trainer(loss=(amp, 4 * (i + 1))), trainer(loss=(fp32, 4 * (i + 1))))
    values = batches.values("loss")
    assert values[None, 0] == (0.5, 0.5)
    assert values[None, 1] == (0.75, 0.5)
    assert values[None, 2][0] != values[None, 2][0]
    assert batches.values("other") == {}
    assert batches.standard_error("loss") == 0.0


def test_what_adds_up_to_whole_numbers_may_be_a_share() -> None:
    batches = FirstBatches("cpu", 1)
    for i in range(3):
        batches.add(torch.ones(4, 2), i, None)
        sums = trainer(loss=(1.3 * (i + 1), 4 * (i + 1)), share=(3.0 * (i + 1), 4 * (i + 1)))
        batches.note_sums(sums, sums)
    assert batches.num_rows_of("loss") is None
    assert batches.num_rows_of("share") == batches.num_rows_of("unknown") == 12


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_first_batches, "MAX_BYTES", 200)
    batches = FirstBatches("cpu", 2)
    for loader_idx in range(2):
        for i in range(5):
            batches.add(torch.ones(4, 3), i, loader_idx)  # 48 bytes of 100
    assert [(one.loader_idx, one.batch_idx) for one in batches.kept] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    batches = FirstBatches("cpu", 1)
    batches.add(torch.ones(4, 300), 0, None)  # the first in any case
    assert len(batches.kept) == 1


def test_edited_batches_are_copied_from_then_on() -> None:
    batches, seen = FirstBatches("cpu", 1), list[Tensor]()
    for i in range(3):
        seen.append(torch.ones(2, 2))
        batches.add({"x": seen[-1]}, i, None)
        seen[-1].mul_(2)
    assert [one.is_intact for one in batches.kept] == [False, True, True]
    assert [float(one.batch["x"][0, 0]) for one in batches.kept] == [2.0, 1.0, 1.0]
