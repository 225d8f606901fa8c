"""The batches of the last step are kept up to a limit, and those of a private fit for later fits."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support import fit
from zoo.overflows import BadRow, fp16, with_bad

from lightning_amp import OverflowLocator
from lightning_amp.shadow import Batches, BatchWindow, _batches, giving


def test_a_window_that_is_too_large_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batches, "_WINDOW_BYTES", 300)  # two batches of 128 bytes
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(0, 7), accumulate_grad_batches=4, callbacks=[locator])
    assert [(r.batch_idx, r.cause) for r in locator.reports] == [(3, "not reproduced"), (7, "loss")]
    assert locator.reports[0].window == (0, 3)


def test_the_span_is_that_of_all_batches_kept_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batches, "_WINDOW_BYTES", 40)
    window = BatchWindow()
    for index in range(3):
        window.add(torch.ones(4), index, "cpu")
    assert [kept.batch_idx for kept in window.kept] == [1, 2]
    assert window.span == (0, 2)
    window.clear()
    assert not window


def test_a_batch_is_copied_once_one_was_edited() -> None:
    window, batch = BatchWindow(), torch.ones(2)
    window.add(batch, 0, "cpu")
    batch.zero_()
    assert not window.kept[0].is_intact
    window.add(batch, 1, "cpu")
    batch.fill_(3)
    assert window.kept[1].is_intact
    assert torch.equal(window.kept[1].batch, torch.zeros(2))


def test_batches_are_copies_without_end() -> None:
    own = torch.ones(2)
    given = iter(Batches([own]))
    first, second = next(given), next(given)
    first.zero_()
    assert own.sum() == second.sum() == 2
    assert len(Batches([own])) > 1000
    assert len(list(Batches([own, own], num=3))) == len(Batches([own], num=3)) == 3


def test_a_data_module_gives_the_batches_and_is_as_before() -> None:
    class Data(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            raise AssertionError("it was set up before")

        def train_dataloader(self) -> Any:
            raise AssertionError

    data = Data()
    before = dict(vars(data))
    with giving(data, Batches([torch.ones(2)])) as source:
        source["data"].setup("fit")
        assert torch.equal(next(iter(source["data"].train_dataloader())), torch.ones(2))
    assert vars(data) == before
    with giving(None, Batches([torch.ones(2)])) as source:
        assert torch.equal(next(iter(source["train_dataloaders"])), torch.ones(2))
