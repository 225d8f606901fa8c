"""A step of the shadow changes neither the module nor trainer and loggers."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from support import Recorder
from torch.utils.data import DataLoader
from zoo.copies import Module

from lightning_amp.shadow._shadow import Shadow


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated")
def test_a_step_of_the_shadow_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    module, logger, found = Module(), Recorder(), {}

    class Probe(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            before = {name: value.clone() for name, value in module.state_dict().items()}
            shadow = Shadow(trainer, pl_module, strategy_attributes={"answer": 42})
            with torch.enable_grad():
                loss = shadow.call("training_step", batch, batch_idx)
            found["shadow"] = shadow
            found["loss"] = loss
            assert shadow.module.trainer.strategy.answer == 42
            assert isinstance(shadow.module.trainer, pl.Trainer)
            assert isinstance(shadow.module.trainer.strategy, SingleDeviceStrategy)
            assert shadow.module.trainer.lightning_module is shadow.module
            assert shadow.view.should_stop
            assert not trainer.should_stop
            assert module.values == []
            assert module.metrics["a"].update_count == 0
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            assert "loss" not in trainer.callback_metrics
            assert "loss" in shadow.view.callback_metrics
            assert logger.rows == logger.calls == []
            trainer.should_stop = True

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, callbacks=[Probe()], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, limit_train_batches=1, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(4, 2), batch_size=4))
    shadow = found["shadow"]
    assert capsys.readouterr().out.count("hello") == 1
    assert {id(p) for p in module.parameters()}.isdisjoint(id(p) for p in shadow.module.parameters())
    assert found["loss"].requires_grad
    assert shadow.module.values == [1.0]
    assert next(set(row) - {"epoch"} for _, row in logger.rows) == {"by hand"}
    assert len(logger.rows) == 3  # and Lightning's two, of the real step
    assert logger.calls == ["call"]
