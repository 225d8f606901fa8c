"""A run of 40 steps equals 20 steps, a checkpoint in the middle of an epoch, and 20 more, bit for bit."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import Poison, Toy, assert_same, fit, scaled_fp32, stock
from support.promises import fused_adamw as fused
from support.promises import plain_adamw as unfused
from support.resuming import Averaging, Net, assert_equal, everything, ours, plugin_for, train
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, OverflowLocator, ScaleMonitor

GRADIENT, NAN = (3, 11, 30, 70), (5, 18, 19, 25, 33, 47, 66)  # batches before and after the cut
NOT_RESUMABLE = "ignore:You're resuming from a checkpoint that ended before the epoch ended"
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


class SaveAt(L.Callback):
    """Save a checkpoint after any batch, also in the middle of an accumulation window."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning_amp.callbacks._overflow_locator"), "disabled", True)


def both(make_plugin: Any, callbacks: Any, tmp_path: Path, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run that never stopped, and the resumed one."""
    kwargs = {"gradient": GRADIENT, "nan": NAN, "optimizer": fused} | kwargs
    whole_folder, folder = tmp_path / "whole", tmp_path / "cut"
    for path in (whole_folder, folder):
        path.mkdir()
    whole = train(make_plugin(), 40, callbacks=callbacks(whole_folder), checkpoints=tmp_path / "a", **kwargs)
    train(make_plugin(), 20, callbacks=callbacks(folder), checkpoints=tmp_path / "b", **kwargs)
    resumed = train(
        make_plugin(), 40, callbacks=callbacks(folder), checkpoints=tmp_path / "b",
        ckpt_path=tmp_path / "b" / "step=20.ckpt", **kwargs,
    )  # fmt: skip
    return everything(resumed, folder), everything(whole, whole_folder)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.few(2)
def test_forty_steps_are_twenty_and_twenty(precision: str, accumulate: int, tmp_path: Path) -> None:
    """Averaged weights, BatchNorm, a schedule per step and all callbacks; without accumulation after a skip."""
    resumed, whole = both(
        lambda: plugin_for(precision), lambda folder: [Averaging(), *ours(folder)], tmp_path,
        accumulate_grad_batches=accumulate, optimizer=fused if accumulate == 1 else unfused,
    )  # fmt: skip
    assert_equal(resumed, whole)
    assert sum(r.skipped for r in whole["history"]) == whole["overflows"] == whole["counters"][1] > 6
    indices = [r.index for r in whole["history"] if r.skipped]
    assert min(indices) < 20 < max(indices)
    assert (19 in indices) == (accumulate == 1)
    assert len(whole["reports"]) == 6
    assert {r[0] for r in whole["gradients"]} == {1, 6, 12, 18, 24, 30, 36}
    assert len(whole["comparison"]) == (2, 5)[accumulate - 1]
    assert set(whole["files"]) == {"scale_history.csv", *(f for f in whole["files"] if f.startswith("overflow_step"))}


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.few(2)
def test_a_fused_optimizer_with_a_schedule(precision: str, tmp_path: Path) -> None:
    """The saving callback reads the learning rate after each batch. Another test below has no such reader."""
    assert_equal(
        *both(lambda: plugin_for(precision), lambda folder: [ScaleMonitor()], tmp_path, accumulate_grad_batches=2)
    )
    checkpoint = torch.load(tmp_path / "a" / "step=20.ckpt", weights_only=True)
    rate = checkpoint["optimizer_states"][0]["param_groups"][0]["lr"]
    assert [rate] == checkpoint["lr_schedulers"][0]["_last_lr"]
    assert rate == pytest.approx(0.01 * 0.97 ** (20 - 7))


@pytest.mark.usefixtures("where_flags_live")
def test_a_checkpoint_has_the_rate_of_the_next_step(tmp_path: Path) -> None:
    """Save where nobody has read the learning rate since the last step: no callback of `train` takes part."""

    class Saves(Toy):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "end.ckpt")

    fit(lambda: Saves(fused, None, lambda o: ExponentialLR(o, 0.9)), plugin_for("fp16"))
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    rate = checkpoint["optimizer_states"][0]["param_groups"][0]["lr"]
    assert [rate] == checkpoint["lr_schedulers"][0]["_last_lr"]


@pytest.mark.filterwarnings(NOT_RESUMABLE)
@pytest.mark.parametrize("averaging", [False, True])
@pytest.mark.parametrize(("make", "mended"), [(lambda: plugin_for("fp16"), True), (lambda: None, False)])
def test_a_checkpoint_inside_of_a_bad_window(make: Any, mended: bool, averaging: bool, tmp_path: Path) -> None:
    """Its gradients are lost, as in fp32; its non-finite BatchNorm statistics must not be kept."""
    path = tmp_path / "window.ckpt"
    callbacks = [Averaging()] if averaging else []
    train(make(), 6, nan=[4], callbacks=[*callbacks, SaveAt(4, path)], accumulate_grad_batches=3)
    resumed = train(make(), 6, callbacks=callbacks, accumulate_grad_batches=3, ckpt_path=path)
    assert all(bool(value.isfinite().all()) for value in resumed.lightning_module.state_dict().values()) == mended


@pytest.mark.filterwarnings(NOT_RESUMABLE)
def test_a_checkpoint_inside_of_a_good_window(tmp_path: Path) -> None:
    """The first batches of the window have updated the statistics. This stays, as with Lightning's plugin in fp32."""
    states: list[Any] = []
    for make in (lambda: plugin_for("fp32"), lambda: None):
        path = tmp_path / f"{len(states)}.ckpt"
        train(make(), 6, callbacks=[SaveAt(4, path)], accumulate_grad_batches=3)
        states.append(torch.load(path, weights_only=True)["state_dict"])
        states.append(train(make(), 6, accumulate_grad_batches=3, ckpt_path=path).lightning_module.state_dict())
    assert_same(states[:2], states[2:])


@pytest.mark.parametrize("after", ["fp32", "bf16", "fp16"])
@pytest.mark.few(1)
def test_the_precision_may_change(after: str, tmp_path: Path) -> None:
    for before in {"fp32", "bf16", "fp16"} - {after}:
        folder = tmp_path / before
        train(plugin_for(before), 20, gradient=GRADIENT, nan=NAN, callbacks=ours(), checkpoints=folder)
        plugin, callbacks = plugin_for(after), ours()
        trainer = train(
            plugin, 40, gradient=GRADIENT, nan=NAN, callbacks=callbacks, checkpoints=folder,
            ckpt_path=folder / "step=20.ckpt",
        )  # fmt: skip
        found = everything(trainer)
        history = callbacks[0].history
        assert (plugin.num_steps, plugin.num_skipped) == (history.num_steps, history.num_skipped)
        assert plugin.num_steps + plugin.num_skipped == 40
        assert plugin.num_skipped == found["overflows"] == len([b for b in (*GRADIENT, *NAN) if b < 40])
        scales = [next(r.scale for r in history if r.index >= start) for start in (0, 20)]
        assert scales == [256.0 if precision == "fp16" else 1.0 for precision in (before, after)]
        assert all(bool(value.isfinite().all()) for value in found["weights"].values())


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_callbacks_come_and_go(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"gradient": GRADIENT, "nan": NAN, "every_n_steps": 10}
    alone = everything(train(plugin_for("fp16"), 40, checkpoints=tmp_path / "a", **kwargs))
    callbacks = ours()
    path = tmp_path / "a" / "step=20.ckpt"
    train(plugin_for("fp16"), 30, callbacks=callbacks, ckpt_path=path, checkpoints=tmp_path / "b", **kwargs)
    history = callbacks[0].history
    assert (history[0].index, history.num_attempted) == (20, 10)
    assert callbacks[1].state_dict()["num_overflows"] == history.num_skipped == 1
    path = tmp_path / "b" / "step=30.ckpt"
    with pytest.warns(UserWarning, match=r"callbacks used to create the checkpoint.*ScaleMonitor"):
        without = train(plugin_for("fp16"), 40, ckpt_path=path, checkpoints=tmp_path / "c", **kwargs)
    assert_equal(everything(without), alone)


class StepsInAHook(Net):
    """Manual optimization; the optimizer steps when the batch is over, the last time after the last batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(fused, schedule=False)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class SaveAtEpochEnd(L.Callback):
    """There are no more steps than these. (Steps in hooks do not count for Lightning's `max_steps`.)"""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


@pytest.mark.timeout(60)
def test_a_step_in_a_hook_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Callbacks learn of it too, although no later batch closes the last step."""
    path = tmp_path / "a.ckpt"
    callbacks = [ScaleMonitor(), OverflowLocator(max_reports=0), SaveAtEpochEnd(path)]
    train(plugin_for("fp16"), -1, gradient=[15], module=StepsInAHook(), callbacks=callbacks)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["AmpPrecision"]["last_step"][0] == 15
    assert checkpoint["callbacks"]["ScaleMonitor"]["records"][-1] == checkpoint["AmpPrecision"]["last_step"]
    assert checkpoint["callbacks"]["OverflowLocator"]["num_overflows"] == checkpoint["AmpPrecision"]["num_skipped"] == 1


def test_a_scale_below_one_is_known_after_a_change_of_precision(tmp_path: Path) -> None:
    """A finite gradient may overflow when it is divided by such a scale. A bf16 checkpoint has scale 1."""
    train(plugin_for("bf16"), 10, checkpoints=tmp_path, every_n_steps=10)
    plugin = plugin_for("fp16", init_scale=2.0**-4)
    trainer = train(
        plugin, 20, callbacks=[Poison(gradient=[2], value=1e38)], checkpoints=tmp_path, every_n_steps=10,
        ckpt_path=tmp_path / "step=10.ckpt",
    )  # fmt: skip
    assert plugin.num_skipped == 1
    assert all(bool(value.isfinite().all()) for value in trainer.lightning_module.state_dict().values())


def test_stock_scalers_history_continues(tmp_path: Path) -> None:
    """`ScaleMonitor` with Lightning's plugin."""

    def run(steps: int, **kwargs: Any) -> ScaleMonitor:
        monitor = ScaleMonitor()
        plugin = stock("fp16", init_scale=256.0, growth_interval=5)
        train(plugin, steps, gradient=GRADIENT, callbacks=[monitor], checkpoints=tmp_path, **kwargs)
        return monitor

    whole, resumed = run(40), run(40, ckpt_path=tmp_path / "step=20.ckpt")
    assert list(resumed.history) == list(whole.history)
    assert whole.history.num_skipped == 3


def test_the_scale_of_both_parts_is_warned_of_once(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"gradient": [1], "checkpoints": tmp_path, "every_n_steps": 10}
    make = functools.partial(plugin_for, "fp16", hysteresis=1, growth_interval=50)
    with pytest.warns(UserWarning, match="fell to 128, below 200"):
        train(make(), 10, callbacks=[ScaleMonitor(1, warn_below=200.0)], **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*below 200")
        monitor = ScaleMonitor(1, warn_below=200.0)
        train(make(), 20, callbacks=[monitor], ckpt_path=tmp_path / "step=10.ckpt", **kwargs)
    assert (monitor.history.num_attempted, monitor.history.num_skipped) == (20, 1)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("plugin", [scaled_fp32, functools.partial(AmpPrecision, "bf16")], ids=["fp16", "bf16"])
def test_a_run_that_goes_on_with_a_fused_optimizer(plugin: Any, tmp_path: Path) -> None:
    """torch restores `fused` with the groups, so the new optimizer is not fused; torch's scaler still calls it as if it
    were.
    """
    path = tmp_path / "first.ckpt"
    fit(lambda: Toy(unfused), plugin()).save_checkpoint(path)
    runs = [
        fit(lambda kind=kind: Toy(kind), plugin(), ckpt_path=path, max_epochs=2, callbacks=[Poison([3])])
        for kind in (fused, unfused)
    ]
    assert [run.precision_plugin.num_skipped for run in runs] == [1, 1]  # pyright: ignore[reportAttributeAccessIssue]
    assert_same(*runs)
