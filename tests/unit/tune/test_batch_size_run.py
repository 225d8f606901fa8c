"""A short training at one batch size: its factories, its end, its facts and its measurement, in this process."""

from __future__ import annotations

import itertools
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from zoo.compared import Sea, Waves, here

from lightning_amp.compare import Run, Spec
from lightning_amp.tune import _batch_size_run
from lightning_amp.tune._batch_size_run import (
    Facts,
    is_out_of_memory,
    measurement,
    run_once,
    why_failed,
)

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


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch_size_run, "run_in_process", here)


def short(folder: Path, module: Any = Plain, data: Any = Ocean, size: int | None = None, **kwargs: Any) -> Any:
    arm = Spec("fp32", {"precision": "fp32"})
    return run_once(arm, (module, data), size, {"accelerator": "cpu", **kwargs}, folder, lambda *_: None)


def test_a_run(tmp_path: Path) -> None:
    run, facts = short(tmp_path)
    assert run.error is None
    assert (facts.own_size, facts.rows, facts.num_rows, facts.device) == (8, 8, 128, "cpu")
    assert (facts.num_batches, facts.per_step, facts.rates) == (run.num_steps, 1, [["AdamW", 0.01]])
    assert 9 <= run.num_steps <= 103
    assert run.peak_memory_bytes
    assert run.step_s
    assert not run.curves
    assert {path.name for path in tmp_path.iterdir()} <= {"facts.json", "progress.json"}


class Uneven(Ocean):
    """The largest batch is neither the first nor the last."""

    def train_dataloader(self) -> Any:
        groups = [[0, 1], [2, 3, 4, 5, 6], [7]]
        return DataLoader(self.data, batch_sampler=groups * 5)  # type: ignore[arg-type]


def test_the_rows_of_the_largest_batch(tmp_path: Path) -> None:
    run, facts = short(tmp_path, data=Uneven)
    assert run.error is None
    assert facts.rows == 5


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
    assert facts.rates == [["SGD", 0.25]]
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == []


def test_accumulation(tmp_path: Path) -> None:
    run, facts = short(tmp_path, accumulate_grad_batches=4)
    assert facts.per_step == 4
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


class Dropped(Ocean):
    batch_size = 200

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size, drop_last=True)


@pytest.mark.parametrize(("data", "expected"), [(Endless, (None, 8)), (Dropped, (None, 0))])
def test_how_many_rows(data: Any, expected: Any, tmp_path: Path) -> None:
    run, facts = short(tmp_path, data=data, max_steps=10)
    assert run.error is None
    assert (facts.num_rows, facts.rows) == expected
    assert (facts.num_batches == 0) == (data is Dropped)


class OfTheModule(Plain):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(40, 8), torch.randn(40, 1)), batch_size=self.hparams["batch_size"])


class NoSize(Ocean):
    batch_size = "8"  # type: ignore[assignment]


@pytest.mark.parametrize(("data", "text"), [(Sea, "there is none."), (NoSize, "it is '8'.")])
def test_what_is_refused(data: Any, text: str, tmp_path: Path) -> None:
    run, facts = short(tmp_path, Plain, data)
    assert facts.refused.startswith("`make_data` or `make_module` must have a `batch_size` of 1 or more")
    assert text in facts.refused
    assert facts.refused in run.error


# -- where the size stands ---------------------------------------------------------------------------------------------


class Both(Ocean):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size


class OnlyHparams(Sea):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.hparams["batch_size"])


@pytest.mark.parametrize(
    ("module", "data", "own_size", "num_rows"),
    [
        (Plain, Ocean, 8, 128),
        (Plain, Both, 4, 128),
        (Plain, OnlyHparams, 4, 128),
        (OfTheModule, L.LightningDataModule, 4, 40),  # the module has the loaders
    ],
)
def test_every_place(module: Any, data: Any, own_size: int, num_rows: int, tmp_path: Path) -> None:
    run, facts = short(tmp_path, module, data, size=16)
    assert run.error is None
    assert (facts.own_size, facts.rows, facts.num_rows) == (own_size, 16, num_rows)


# -- measurements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory", True),
        ("its process was killed by SIGSEGV", False),
        (None, False),
    ],
)
def test_out_of_memory(error: str | None, expected: bool) -> None:
    assert is_out_of_memory(Run("x", 0, error=error)) is expected


def test_memory_and_speed() -> None:
    run = Run("x", 0, peak_memory_bytes=2**29, samples_per_s=(9.0, 10.0, 50.0), step_s=(2.0, 4.0, 4.0))
    assert measurement(run, Facts(rows=8), 8) == (8, 0.5, 10.0)
    assert measurement(run, Facts(rows=5), 8) == (8, 0.5, 2.0)  # the loader has another size
    assert measurement(run, Facts(rows=8, process_gib=0.6), 8).peak_gib == 0.5
    assert measurement(run, Facts(rows=8, process_gib=2.125), 8).peak_gib == pytest.approx(2.0)
    assert measurement(Run("x", 0, error="no"), Facts(), 8).peak_gib == math.inf


LOG = f"""\
Traceback (most recent call last):
  File "/home/me/net.py", line 7, in training_step
    return self.helper(batch)
  File "/home/me/my helpers.py", line 12, in helper
    torch.cat(x)
  File "{sysconfig.get_path("stdlib")}/runpy.py", line 3, in run
  File "/x/site-packages/torch/functional.py", line 3, in cat
ValueError: two
lines.
"""


def test_an_error_names_the_last_line_of_the_user() -> None:
    found = why_failed(Run("x", 0, error="ValueError: two\nlines.", log=LOG))
    assert found == "ValueError: two lines (/home/me/my helpers.py, line 12, in helper)"
    assert why_failed(Run("x", 0, error="its process was killed", log="")) == "its process was killed"
