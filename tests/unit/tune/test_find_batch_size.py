"""`find_batch_size` as a whole: most tests run in this process, some in fresh processes."""

from __future__ import annotations

import gc
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import lightning as L
import numpy as np
import pytest
import torch
from support.approved import assert_refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo.compared import here

import lightning_amp
from lightning_amp.compare import Run, Spec
from lightning_amp.tune import BatchSizes, _batch_size_run

pytestmark = [
    pytest.mark.usefixtures("in_tmp_path"),
    pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
CPU = {"accelerator": "cpu"}


class Wide(L.LightningModule):
    """Its activations take far more memory than its weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        self.net = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Rows(L.LightningDataModule):
    def __init__(self, rows: int = 4096, batch_size: int = 32) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(self.rows, 8), torch.randn(self.rows, 1))
        return DataLoader(data, batch_size=self.batch_size)


def fifty() -> Rows:
    return Rows(50, 64)


class NotInBf16(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("no bf16 here")
        return super().training_step(batch, batch_idx)


class Never(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ArithmeticError("never")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the sizes that ran in this process."""
    ran: list[str] = []

    def run(spec: Spec, on_progress: Any) -> Run:
        ran.append(spec.label)
        gc.collect()
        return here(pickle.loads(cloudpickle.dumps(spec)))

    monkeypatch.setattr(_batch_size_run, "run_in_process", run)
    monkeypatch.setattr(_batch_size_run, "_STEADY_S", 0.0)
    return ran


def peak_gib(size: int, folder: Path) -> float:
    """Return the peak of a size without a search."""
    folder.mkdir()
    factories = Wide, partial(Rows, batch_size=size)
    run, _ = _batch_size_run.run_once(Spec("x", {"precision": "fp32"}), factories, None, CPU, folder, print)
    return (run.peak_memory_bytes or 0) / 2**30


@pytest.mark.slow
def test_the_next_multiple_of_8_would_not_fit(sizes: list[str], tmp_path: Path) -> None:
    limit = 0.001
    found = lightning_amp.find_batch_size(Wide, Rows, ["fp32"], memory_limit_gib=limit, trainer_kwargs=CPU)
    result = found["fp32"]
    assert result.batch_size % 8 == 0
    assert result.peak_gib <= limit
    assert peak_gib(result.batch_size, tmp_path / "a") == pytest.approx(result.peak_gib, rel=0.01)
    assert peak_gib(result.batch_size + 8, tmp_path / "b") > limit


@pytest.mark.slow
def test_a_fresh_process(tmp_path: Path) -> None:
    """This test replaces nothing."""
    before = torch.random.get_rng_state(), sorted(tmp_path.iterdir())
    found = lightning_amp.find_batch_size(Wide, fifty, ["bf16"], memory_limit_gib=0.1, trainer_kwargs=CPU)
    result = found["bf16"]
    assert isinstance(found, BatchSizes)
    assert (result.batch_size, result.error) == (50, None)
    assert 0 < result.peak_gib < 0.1
    assert result.samples_per_s > 0
    assert result.lr == pytest.approx(0.001 * (50 / 64) ** 0.5, rel=0.01)
    assert [point.batch_size for point in result.measured] == [50]
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == sorted(tmp_path.iterdir())


def test_one_precision_fails(sizes: list[str]) -> None:
    precisions = {"mine": {"precision": "bf16"}, "plain": 32}
    found = lightning_amp.find_batch_size(NotInBf16, fifty, precisions, memory_limit_gib=1, trainer_kwargs=CPU)
    assert found["plain"].batch_size == 50
    assert (found["mine"].batch_size, found["mine"].lr) == (0, None)
    assert found["mine"].error == "Training in mine failed at batch size 64: ArithmeticError: no bf16 here."
    assert "| mine | none |" in str(found)


def test_all_fail(sizes: list[str]) -> None:
    with pytest.raises(RuntimeError, match="^Training in fp32 failed .* never. Training in bf16 failed .* never.$"):
        lightning_amp.find_batch_size(Never, fifty, memory_limit_gib=1, trainer_kwargs=CPU)


def needs(rows: int) -> None: ...


def test_wrong_arguments_run_nothing(sizes: list[str]) -> None:
    legal = {"make_module": Wide, "make_data": Rows, "memory_limit_gib": 1, "trainer_kwargs": CPU}
    wrong = [
        {"make_module": 3},
        {"make_data": needs},
        *({"precisions": one} for one in ("fp32", ["fp33"])),
        *({"memory_limit_gib": one} for one in (0, "4", True, float("nan"), None)),
        *({"trainer_kwargs": one} for one in ({"max_epoch": 1}, {"precision": 16})),
    ]
    assert_refused("find_batch_size", lambda **one: lightning_amp.find_batch_size(**(legal | one)), wrong)
    assert sizes == []


# -- the peak of the process -------------------------------------------------------------------------------------------


class Simulates(Wide):
    """Each row needs 1 MiB that torch has not allocated."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        simulated = np.ones((len(x), 2**17))
        return (self.net(x) + float(simulated[0, 0])).square().mean()


class Images(Rows):
    """A data set of 0.4 GiB in memory, of which each batch is a small part."""

    def setup(self, stage: str) -> None:
        self.images = np.ones((self.rows, 26_000))

    def train_dataloader(self) -> Any:
        first = torch.from_numpy(self.images[:, :8].astype(np.float32))
        return DataLoader(TensorDataset(first, torch.ones(self.rows, 1)), batch_size=self.batch_size)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a running process")
@pytest.mark.slow
@pytest.mark.parametrize(("data", "limit_gib"), [(Rows, 0.3), (Images, 0.65)])
def test_on_a_cpu_the_peak_of_the_process_counts(data: Any, limit_gib: float) -> None:
    """0.25 to 0.35 GiB are left for some 300 rows, and 0.125 GiB do not count."""
    make = partial(data, 2048, 128)
    found = lightning_amp.find_batch_size(Simulates, make, ["fp32"], memory_limit_gib=limit_gib, trainer_kwargs=CPU)
    assert 200 <= found["fp32"].batch_size <= 448
    assert found["fp32"].peak_gib <= limit_gib
    assert "growth of the process" in found["fp32"].message
