from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support import Manual, Poison, Recorder, Toy, batches, fit, stock
from torch import Tensor

from lightning_amp import AmpPrecision, DynamicLossScaler, ScaleMonitor
from lightning_amp.callbacks import _scale_monitor
from lightning_amp.reports import ScaleHistory

KEYS = {_scale_monitor.LOSS_SCALE, _scale_monitor.SKIPPED_STEPS, _scale_monitor.SKIP_RATE}


def fp16(**kwargs: Any) -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(64.0, **kwargs))


def test_keys_are_those_of_the_docstring() -> None:
    recorder = Recorder()
    trainer = fit(Toy, fp16(), batches(2), logger=recorder, callbacks=[ScaleMonitor()])
    rows = [set(row) for _, row in recorder.rows if "amp/loss_scale" in row]
    assert rows == [KEYS, KEYS]
    assert {k for k in trainer.callback_metrics if k.startswith("amp/")} == KEYS
    assert all(f"`{key}`" in ScaleMonitor.__doc__ for key in KEYS)


@pytest.mark.parametrize("plugin", ["ours", "lightning"])
def test_what_it_logs(plugin: str) -> None:
    recorder = Recorder()
    monitor = ScaleMonitor(2)
    fit(
        Toy,
        fp16() if plugin == "ours" else stock("fp16", init_scale=64.0),
        batches(7),
        logger=recorder,
        callbacks=[Poison(gradient=[1, 2]), monitor],
    )
    rows = [(step, *row.values()) for step, row in recorder.rows if "amp/loss_scale" in row]
    # Lightning's own rows for these batches have the same steps, counted from 0; the last row is from the end of fit.
    assert rows == [(1, 32.0, 1.0, 0.5), (3, 16.0, 2.0, 0.5), (5, 16.0, 2.0, 2 / 6), (7, 16.0, 2.0, 2 / 7)]
    assert monitor.history.summary() == "2 of 7 steps skipped; scale 64 -> 16"
    assert [r.index for r in monitor.history if r.skipped] == [1, 2]


@pytest.mark.parametrize("plugin", ["ours", "lightning"])
def test_each_step_of_a_batch_counts(plugin: str) -> None:
    class ThreeSteps(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            for bad in (False, True, batch_idx == 0):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                if bad:
                    self.net[0].weight.grad.fill_(math.inf)
                optimizer.step()

    monitor = ScaleMonitor()
    fit(ThreeSteps, fp16() if plugin == "ours" else stock("fp16", init_scale=64.0), batches(2), callbacks=[monitor])
    assert monitor.history.summary() == "3 of 6 steps skipped; scale 64 -> 8"


def test_a_scale_that_starts_below_the_warning_has_not_fallen(recwarn: pytest.WarningsRecorder) -> None:
    fit(Toy, AmpPrecision("fp16", scaler=0.25), batches(4), callbacks=[ScaleMonitor()])
    assert not [one for one in recwarn if "loss scale fell" in str(one.message)]


def test_says_that_there_is_nothing_to_show(caplog: pytest.LogCaptureFixture) -> None:
    monitor = ScaleMonitor()
    with caplog.at_level("INFO"):
        fit(Toy, stock("bf16"), batches(2), callbacks=[monitor])
    assert "`ScaleMonitor` stands aside: the plugin `MixedPrecision` has no loss scaler" in caplog.text
    assert len(monitor.history) == 0
    assert monitor.history.summary() == "no optimizer step was recorded"  # two were taken


def test_warns_below() -> None:
    with pytest.warns(UserWarning, match="fell to 16, below 20") as caught:
        fit(Toy, fp16(), callbacks=[Poison(gradient=[1, 2, 3]), ScaleMonitor(warn_below=20.0)])
    assert sum("fell to" in str(w.message) for w in caught) == 1


def test_writes_its_file_to_a_url(folder_url: str) -> None:
    monitor = ScaleMonitor(dirpath=folder_url)
    assert copy.deepcopy(monitor).dirpath == pickle.loads(pickle.dumps(monitor)).dirpath == folder_url
    fit(Toy, fp16(), callbacks=[Poison(gradient=[1]), monitor])
    assert list(ScaleHistory.from_csv(f"{folder_url}/scale_history.csv")) == list(monitor.history)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_goes_on_from_a_checkpoint_at_a_url(memory_folder: str) -> None:
    """Lightning's own callback writes into the same folder."""
    for epochs, ckpt_path in ((1, None), (2, f"{memory_folder}/epoch=0-step=8.ckpt")):
        callbacks = [ScaleMonitor(dirpath=memory_folder), ModelCheckpoint(memory_folder, save_top_k=-1)]
        kwargs: dict[str, Any] = {"max_epochs": epochs, "enable_checkpointing": True, "callbacks": callbacks}
        fit(Toy, fp16(), ckpt_path=ckpt_path, **kwargs)
        assert ScaleHistory.from_csv(f"{memory_folder}/scale_history.csv").num_attempted == 8 * epochs
