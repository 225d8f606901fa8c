"""The end of a short training, and the facts that it notes. The training runs in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from zoo.compared import Sea, Waves, here

from lightning_amp.compare import Run, Spec
from lightning_amp.tune.batch_size._batch_size_attribute import FactoryWithBatchSize
from lightning_amp.tune.batch_size._learning_rate import UsedRate
from lightning_amp.tune.batch_size._probe import Facts, Probe
from lightning_amp.tune.batch_size._short_runs import short_trainer

pytestmark = [
    pytest.mark.usefixtures("in_tmp_path"),
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Total length of `\\w+` across ranks is zero"),
]


class Ocean(Sea):
    batch_size = 8

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


class Plain(Waves):
    """Its validation never runs, so no metric of validation is logged."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError

    def on_train_epoch_end(self) -> None:
        assert not any(isinstance(c, (EarlyStopping, ModelCheckpoint)) for c in self.trainer.callbacks)


def short(folder: Path, module: Any = Plain, data: Any = Ocean, size: int | None = None, **kwargs: Any) -> Any:
    probe = Probe(str(folder / "facts.json"))
    trainer = short_trainer({"accelerator": "cpu", **kwargs}, probe)
    factories = FactoryWithBatchSize(module, size), FactoryWithBatchSize(data, size)
    run: Run = here(Spec("fp32", {"precision": "fp32"}, 0, False, *factories, trainer, str(folder)))
    return run, Facts.read(folder / "facts.json")


def test_a_run(tmp_path: Path) -> None:
    run, facts = short(tmp_path)
    assert run.error is None
    assert facts == Facts(
        own_size=8, num_rows=128, loader_sizes=(8,), batch_rows=8, num_batches=run.num_steps, device="cpu",
        rates=(UsedRate("AdamW", 0.01),),
    )  # fmt: skip
    assert 9 <= run.num_steps <= 103
    assert run.peak_memory_bytes
    assert run.step_s
    assert not run.curves
    assert {path.name for path in tmp_path.iterdir()} <= {"facts.json", "progress.json"}


def test_another_size(tmp_path: Path) -> None:
    _, facts = short(tmp_path, size=64)
    assert (facts.own_size, facts.loader_sizes, facts.batch_rows, facts.num_rows) == (64, (64,), 64, 128)


class Uneven(Ocean):
    """The largest batch is neither the first nor the last."""

    def train_dataloader(self) -> Any:
        groups = [[0, 1], [2, 3, 4, 5, 6], [7]]
        return DataLoader(self.data, batch_sampler=groups * 5)  # type: ignore[arg-type]


def test_the_rows_of_the_largest_batch(tmp_path: Path) -> None:
    run, facts = short(tmp_path, data=Uneven)
    assert run.error is None
    assert facts.batch_rows == 5


class Schedule(Plain):
    """Asks for the number of steps, and monitors a metric of validation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25)
        steps = self.trainer.estimated_stepping_batches
        assert 0 < steps < 10**6
        plateau = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        cycle = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.001)
        return [optimizer], [plateau, cycle]

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss")]


def test_schedules_and_callbacks_that_ask_for_more(tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(monitor="val_loss"), TQDMProgressBar()]
    kwargs = {"callbacks": callbacks, "max_epochs": 1, "limit_train_batches": 0.1, "val_check_interval": 5}
    run, facts = short(tmp_path, Schedule, size=128, **kwargs)
    assert run.error is None
    assert run.num_steps >= 9
    assert facts.rates == (("SGD", 0.25),)
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == []


def test_accumulation(tmp_path: Path) -> None:
    run, facts = short(tmp_path, accumulate_grad_batches=4)
    assert facts.accumulated == 4
    assert facts.num_batches >= 3 * 4 + 6
    assert run.num_steps >= 4


class TwoOptimizers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.parameters(), lr=lr) for lr in (0.1, 0.2, 0.3, 0.4)]


def test_manual_optimization(tmp_path: Path) -> None:
    run, facts = short(tmp_path, TwoOptimizers)
    assert run.error is None
    assert facts.num_batches >= 9
    assert [lr for _, lr in facts.rates] == [0.1, 0.2, 0.3, 0.4]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.randn(8), torch.randn(1)) for _ in itertools.count())


class Endless(Ocean):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=self.batch_size)


class Several(Ocean):
    """One loader with as many rows as its sampler draws, and one shorter loader."""

    def train_dataloader(self) -> Any:
        sampler = RandomSampler(self.data, replacement=True, num_samples=300)
        rest = TensorDataset(*self.data[:7])
        return [DataLoader(self.data, self.batch_size, sampler=sampler), DataLoader(rest, self.batch_size)]


class Slices(Ocean):
    """Whole batches at once: the loader collates nothing."""

    def train_dataloader(self) -> Any:
        starts = range(0, len(self.data), self.batch_size)
        return DataLoader(self.data, batch_size=None, sampler=[slice(i, i + self.batch_size) for i in starts])  # type: ignore


class Indices(Ocean):
    def train_dataloader(self) -> Any:
        batches = BatchSampler(RandomSampler(self.data), self.batch_size, drop_last=False)
        return DataLoader(self.data, batch_size=None, sampler=batches)


class TakesTheFirst(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


class Dropped(Ocean):
    batch_size = 200

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size, drop_last=True)


@pytest.mark.parametrize(
    ("data", "module", "expected"),
    [
        (Endless, Plain, (None, (8,), 8)),
        (Several, TakesTheFirst, (300, (8, 8), 8)),
        (Dropped, Plain, (128, (200,), None)),
        (Slices, Plain, (None, (None,), 8)),
        (Indices, Plain, (128, (8,), 8)),
    ],
)
def test_how_many_rows(data: Any, module: Any, expected: Any, tmp_path: Path) -> None:
    run, facts = short(tmp_path, module, data, max_steps=10)
    assert run.error is None
    assert (facts.num_rows, facts.loader_sizes, facts.batch_rows) == expected
    assert (facts.num_batches == 0) == (data is Dropped)


class OfTheModule(Plain):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(40, 8), torch.randn(40, 1)), batch_size=self.hparams["batch_size"])


def test_loaders_of_the_module(tmp_path: Path) -> None:
    run, facts = short(tmp_path, OfTheModule, L.LightningDataModule, size=10)
    assert run.error is None
    assert (facts.own_size, facts.num_rows, facts.loader_sizes) == (10, 40, (10,))


class NoSize(Ocean):
    batch_size = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (Sea, "an attribute or one of `hparams`, that the loaders are made with; there is none in `Sea` and `Plain`."),
        (NoSize, "`batch_size` must be an integer of 1 or more to begin with, got None."),
        (L.LightningDataModule, "there is none in `Lit`."),
    ],
)
def test_what_is_refused(data: Any, text: str, tmp_path: Path) -> None:
    class Lit(Plain):
        def train_dataloader(self) -> Any: ...

    run, facts = short(tmp_path, Lit if data is L.LightningDataModule else Plain, data)
    assert text in (facts.refused or "")
    assert facts.refused in (run.error or "")


@pytest.mark.parametrize("text", ["", "{", None])
def test_a_torn_file_has_no_facts(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "facts.json").write_text(text)
    assert Facts.read(tmp_path / "facts.json") == Facts()
