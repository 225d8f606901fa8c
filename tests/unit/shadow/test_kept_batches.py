"""Batches of one fit that are given to later fits."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from lightning_amp.shadow import Batches, giving, set_method


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


def test_a_method_is_restored() -> None:
    class Owner:
        def method(self) -> int:
            return 1

    owner: Any = Owner()
    first = set_method(owner, "method", lambda: 2)
    second = set_method(owner, "method", lambda: 3)
    assert owner.method() == 3
    second()
    assert owner.method() == 2
    first()
    assert "method" not in vars(owner)
