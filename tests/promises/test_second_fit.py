"""A second fit of the same Trainer continues where the first ended, as `global_step` does; another Trainer starts
afresh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from support import Poison, Records, Toy, all_of_ours, assert_same, batches, fit, quiet_trainer, scaled_fp32, stock_fp32
from support.promises import fused_adamw, plain_adamw
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import AmpPrecision, DynamicLossScaler, ScaleMonitor


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning_amp.callbacks._overflow_locator"), "disabled", True)


class Validated(Toy):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def seen(trainer: L.Trainer) -> dict[str, Any]:
    """Return every count that continues."""
    plugin: Any = trainer.precision_plugin
    found = {type(c).__name__: c for c in trainer.callbacks}  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "plugin": plugin.state_dict(),
        "scale": plugin.scaler.get_scale(),
        "history": list(found["ScaleMonitor"].history),
        "reports": [r.as_dict() for r in found["OverflowLocator"].reports],
        "overflows": found["OverflowLocator"].state_dict()["num_overflows"],
        "gradients": list(found["GradientMonitor"].table),
        "comparison": list(found["MetricComparison"].table),
        "steps": trainer.global_step,
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any], *without: str) -> None:
    for key in one.keys() - set(without):
        assert str(one[key]) == str(other[key]), key


def make_module() -> Validated:
    torch.manual_seed(0)
    return Validated(fused_adamw, None, lambda o: ExponentialLR(o, 0.9))


def make_plugin() -> AmpPrecision:
    return scaled_fp32(init_scale=1024.0, growth_interval=5)


def make_trainer(epochs: int, plugin: Any, *more: L.Callback, **kwargs: Any) -> L.Trainer:
    return quiet_trainer(plugins=[plugin], max_epochs=epochs, callbacks=[*all_of_ours(), *more], **kwargs)


def go_on(trainer: L.Trainer, module: L.LightningModule, epochs: int, **kwargs: Any) -> None:
    trainer.fit_loop.max_epochs = epochs
    trainer.fit(module, batches(), batches(2) if isinstance(module, Validated) else None, **kwargs)


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("between", ["nothing", "validate"])
@pytest.mark.few(2)
def test_two_fits_are_one(between: str) -> None:
    """Overflows on both sides, with the growth tracker and the samples in the middle of their counts."""
    poison = (1, 4, 11, 13)
    whole = make_trainer(2, make_plugin(), Poison(gradient=poison))
    torch.manual_seed(1)
    whole.fit(module := make_module(), batches(), batches(2))
    twice = make_trainer(1, make_plugin(), Poison(gradient=poison))
    torch.manual_seed(1)
    twice.fit(again := make_module(), batches(), batches(2))
    half = seen(twice)
    if between == "validate":
        twice.validate(again, batches(2), verbose=False)
        rows = len(half["comparison"])
        assert_equal(seen(twice), half, "comparison")
        assert len(seen(twice)["comparison"]) == 2 * rows
    go_on(twice, again, 2)
    # Lightning makes optimizer and schedule anew for the second fit
    assert_equal(seen(twice), seen(whole), "gradients", "comparison", "reports")
    assert len(seen(twice)["reports"]) == len(seen(whole)["reports"]) == 4
    assert [r.step for r in seen(twice)["gradients"]] == [r.step for r in seen(whole)["gradients"]]
    assert len(seen(twice)["comparison"]) == len(seen(whole)["comparison"]) + (between == "validate")
    assert module.trainer is whole


def test_a_streak_of_skips_goes_on() -> None:
    plugin = scaled_fp32(max_consecutive_skips=10, min_scale=2.0**16)
    trainer = quiet_trainer(plugins=[plugin], callbacks=[Poison(gradient=range(16))])
    trainer.fit(module := Toy(), batches())
    assert plugin.num_skipped == 8
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(FloatingPointError, match="10 optimizer steps in a row"):
        trainer.fit(module, batches())
    assert plugin.num_skipped == 10


@pytest.mark.parametrize(
    ("precision", "scaler"),
    [
        ("fp16", lambda: torch.amp.GradScaler("cpu", init_scale=64.0)),
        ("fp16", lambda: DynamicLossScaler(64.0)),
        ("bf16", None),
        ("fp32", None),
    ],
)
def test_any_scaler_and_none(precision: str, scaler: Callable[[], Any] | None) -> None:
    plugin: Any = AmpPrecision(precision, scaler=scaler and scaler())
    trainer = quiet_trainer(plugins=[plugin], callbacks=[Poison(gradient=[1, 9])])
    trainer.fit(module := Toy(), batches())
    assert scaler is None or plugin.scaler.get_scale() == 32.0
    go_on(trainer, module, 2)
    assert scaler is None or plugin.scaler.get_scale() == 16.0
    assert (plugin.num_steps, plugin.num_skipped, plugin.last_step.index) == (14, 2, 15)


def test_listeners_are_those_of_their_fit() -> None:
    trainer = quiet_trainer(plugins=[AmpPrecision("fp32")], callbacks=[records := Records()])
    trainer.fit(module := Toy(), batches())
    go_on(trainer, module, 2)
    assert [r.index for r in records.all] == list(range(16))


def test_another_trainer_starts_afresh() -> None:
    """k-fold training with the same plugin and callbacks."""
    plugin, watchers = make_plugin(), all_of_ours()
    runs: list[dict[str, Any]] = []
    for _ in range(2):
        trainer = quiet_trainer(plugins=[plugin], callbacks=[*watchers, Poison(gradient=[1, 4])])
        torch.manual_seed(1)
        trainer.fit(make_module(), batches(), batches(2))
        runs.append(seen(trainer))
    assert_equal(*runs)


@pytest.mark.parametrize("theirs", [False, True])
def test_a_checkpoint_wins(tmp_path: Any, theirs: bool) -> None:
    """A checkpoint without state of plugin and callbacks clears the first fit's state: it belongs to other weights."""
    if theirs:
        first = fit(lambda: Toy(fused_adamw), stock_fp32(init_scale=256.0), limit_train_batches=4)
    else:
        first = make_trainer(1, make_plugin(), Poison(gradient=[2]), limit_train_batches=4)
        torch.manual_seed(0)
        first.fit(make_module(), batches(), batches(2))
    first.save_checkpoint(tmp_path / "a.ckpt")
    used = make_trainer(1, make_plugin(), Poison(gradient=[1, 4]))
    used.fit(module := make_module(), batches(), batches(2))
    fresh = make_trainer(2, make_plugin(), Poison())
    for trainer in (used, fresh):
        torch.manual_seed(2)
        go_on(trainer, module if trainer is used else make_module(), 2, ckpt_path=tmp_path / "a.ckpt")
    assert_equal(seen(used), seen(fresh))
    assert_same(used, fresh)


def test_the_tuners_leave_no_trace(tmp_path: Any) -> None:
    class Tuned(Toy):
        lr = 1e-3
        batch_size = 4

        def __init__(self) -> None:
            super().__init__(plain_adamw)

        def train_dataloader(self) -> Any:
            return batches(8, self.batch_size)

    plugin = make_plugin()
    trainer = quiet_trainer(
        plugins=[plugin], default_root_dir=tmp_path, callbacks=[monitor := ScaleMonitor()], max_epochs=2
    )
    module = Tuned()
    Tuner(trainer).lr_find(module, num_training=6, early_stop_threshold=None)
    Tuner(trainer).scale_batch_size(module, mode="power", max_trials=2, steps_per_trial=2)
    trainer.fit(module)
    assert plugin.num_steps == trainer.global_step == 16
    assert monitor.history.num_attempted == 16
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**13
