"""Reading and setting the batch size of modules and data modules."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_amp.tune.batch_size._batch_size_attribute import (
    FactoryWithBatchSize,
    ModuleLoaders,
    held_sizes,
    hold_size,
    is_size,
)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader([1, 2, 3])  # pyright: ignore[reportArgumentType]


class Attribute(Data):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4


class OnTheClass(Data):
    batch_size = 4


class Hparams(Data):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()


class Property(Hparams):
    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.hparams["batch_size"]


class Both(Attribute):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()


class OfTheModule(L.LightningModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size


class AsksForATrainer(L.LightningModule):
    @property
    def batch_size(self) -> int:
        return self.trainer.num_devices


class AMethod(L.LightningModule):
    def batch_size(self) -> int:
        return 4


@pytest.mark.parametrize("kind", [Attribute, OnTheClass, Hparams, Property, Both, OfTheModule])
def test_every_place(kind: Any) -> None:
    other = kind()
    made = FactoryWithBatchSize(kind, 16)()
    assert type(made) is kind
    assert set(held_sizes(made)) == {16}
    assert set(held_sizes(FactoryWithBatchSize(kind, None)())) == {4}
    assert set(held_sizes(other)) == {4}


@pytest.mark.parametrize("kind", [L.LightningModule, AMethod, AsksForATrainer])
def test_no_place(kind: Any) -> None:
    owner = kind()
    hold_size(owner, 8)
    assert held_sizes(owner) == []


def test_the_data_module_comes_last_as_in_lightning() -> None:
    data = FactoryWithBatchSize(Both, 8)()
    assert held_sizes(OfTheModule(2), data) == [2, 2, 8, 8]


@pytest.mark.parametrize("value", [None, 0, -1, True, "8", 2.0])
def test_what_is_no_size(value: object) -> None:
    assert not is_size(value)


def test_a_wrong_factory_is_left_to_who_calls_it() -> None:
    assert FactoryWithBatchSize(lambda: 3, 8)() == 3


def test_without_loaders_those_of_the_module() -> None:
    assert type(FactoryWithBatchSize(L.LightningDataModule, 8)()) is ModuleLoaders
