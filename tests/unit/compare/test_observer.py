"""The callback that watches a run; `test_train.py` tests the record that it makes."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader
from zoo.compared import TRAINER, Sea, Waves

from lightning_amp import AmpPrecision
from lightning_amp.compare import _observer
from lightning_amp.compare._observer import Observer


def watched(module: Any = Waves, data: Any = Sea, **changes: Any) -> Observer:
    observer, kwargs = Observer({}), {**TRAINER, "enable_progress_bar": False, **changes}
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(**kwargs, callbacks=[observer], plugins=[AmpPrecision("fp16")])
    trainer.fit(module(), datamodule=data())
    return observer


class Loaders(Sea):
    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), super().val_dataloader()]


class Often(Waves):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("step", 17.0)
        self.log("at_end", 1.0)


def test_curves_know_loaders_and_the_epoch_end() -> None:
    observer = watched(Often, Loaders, val_check_interval=0.5)
    names = {f"{name}/dataloader_idx_{i}" for name in ("val_loss", "val_loss_epoch") for i in (0, 1)}
    assert set(observer.curves) == names | {"at_end"}
    assert [step for step, _ in observer.curves["at_end"]] == [6, 12, 18, 24]


def test_losses_of_a_long_run_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observer, "_MOST_LOSSES", 6)
    observer = watched(max_epochs=4)
    steps = [step for step, _ in observer.losses()]
    assert 3 <= len(steps) <= 6
    assert steps == sorted(steps)
    assert steps[-1] > 30


class Ragged(Sea):
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=50)


def test_the_size_of_each_batch_counts() -> None:
    assert list(watched(data=Ragged).watch._samples) == [50, 50, 28] * 2
