"""After an exception anywhere in training, the user's objects are unchanged, and plugin and callbacks work again."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.promises import fused_adamw
from support.resuming import Averaging, Net, assert_equal, everything, ours, plugin_for, train
from torch import Tensor

from lightning_amp import ScaleMonitor
from lightning_amp._files import LEFTOVER
from lightning_amp.reports import ScaleHistory

PLACES = (
    "forward", "on_after_backward", "on_before_optimizer_step", "optimizer", "lr_scheduler_step", "on_train_batch_end",
    "validation_step", "on_save_checkpoint",
)  # fmt: skip


class Fragile(Net):
    """Raise once, at one place. A `KeyboardInterrupt` is raised in the module's shadow, too."""

    def __init__(self, place: str = "", errors: tuple[BaseException, ...] = ()) -> None:
        torch.manual_seed(0)
        super().__init__(fused_adamw)
        self.place, self.errors = place, errors

    def reach(self, place: str) -> None:
        if place == self.place and self.trainer.global_step >= 9 and self.errors:
            (error,) = self.errors
            if type(self.trainer) is L.Trainer or isinstance(error, KeyboardInterrupt):
                self.errors = ()
                raise error

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        self.reach("forward" if self.training else "validation_step")
        return loss

    def on_after_backward(self) -> None:
        self.reach("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("on_before_optimizer_step")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self.reach("optimizer")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.reach("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, *args: Any) -> None:
        self.reach("on_train_batch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reach("on_save_checkpoint")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Lightning ignores SIGINT after a KeyboardInterrupt."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in found.items():
        signal.signal(number, handler)


def is_as_it_was(module: L.LightningModule, callbacks: list[L.Callback]) -> None:
    trainer = module.trainer
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    assert type(config.scheduler) is torch.optim.lr_scheduler.ExponentialLR
    assert type(optimizer) is torch.optim.AdamW
    assert not {"found_inf", "grad_scale"} & set(vars(optimizer))
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks")
    assert not any(getattr(optimizer, name) for name in hooks)
    for child in module.modules():
        assert not any(getattr(child, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward"))
        assert not {"forward", "training_step", "validation_step", "lr_scheduler_step"} & set(vars(child))
    assert type(callbacks[0]) is Averaging
    assert not trainer.precision_plugin.records.subscriptions
    assert getattr(torch._functorch.config, "backward_pass_autocast", None) != "off"
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


ONCE = {"gradient": [3, 12], "nan": [5], "every_n_steps": 10, "accumulate_grad_batches": 2}


@functools.cache
def undisturbed() -> dict[str, Any]:
    return everything(train(plugin_for("fp16"), 12, callbacks=[Averaging(), *ours()], module=Fragile(), **ONCE))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("error", [KeyError("crash"), KeyboardInterrupt()], ids=["KeyError", "KeyboardInterrupt"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.few(6)
def test_everything_works_again(place: str, error: BaseException, tmp_path: Path) -> None:
    plugin, callbacks = plugin_for("fp16"), [Averaging(), *ours(tmp_path / "ours")]
    module = Fragile(place, (error,))
    settings: dict[str, Any] = {**ONCE, "callbacks": callbacks, "checkpoints": tmp_path / "a"}
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else KeyError):
        train(plugin, 20, module=module, **settings)
    is_as_it_was(module, callbacks)
    history = ScaleHistory.from_csv(tmp_path / "ours" / "scale_history.csv")
    assert list(history) == list(callbacks[1].history)
    assert history.num_attempted >= 8
    # Lightning's own averaging callback does not support two fits
    settings |= {"callbacks": [Averaging(), *callbacks[1:]], "checkpoints": None}
    again = train(plugin, 12, module=Fragile(), **settings)
    assert_equal(everything(again), undisturbed())


class Terminate(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 10:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sigterm_is_a_clean_end(precision: str, tmp_path: Path) -> None:
    module, callbacks = Net(fused_adamw), [Averaging(), *ours(tmp_path)]
    with pytest.raises(SIGTERMException):
        train(plugin_for(precision), 40, nan=[5], module=module, callbacks=[*callbacks, Terminate()])
    is_as_it_was(module, callbacks)
    history = ScaleHistory.from_csv(tmp_path / "scale_history.csv")
    assert (history.num_attempted, history.num_skipped) == (11, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["overflow_step00005_rank0.json", "scale_history.csv"]
    assert not list(tmp_path.glob(f".*{LEFTOVER}"))


@pytest.mark.parametrize("callbacks", [[], [ScaleMonitor()]], ids=["alone", "ScaleMonitor"])
def test_what_fails_on_the_way_out_does_not_hide_the_exception(callbacks: list[L.Callback]) -> None:
    """The user presses Ctrl+C after 64 skips in a row that nobody has read yet: the interrupt must win over the skip
    error.
    """

    class Interrupt(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                plugin.records.max_consecutive_skips = 4
                raise KeyError("crash")

    plugin = plugin_for("bf16")
    module = Net(fused_adamw, schedule=False)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError, match="crash"):
        train(plugin, 20, nan=range(20), module=module, callbacks=[*callbacks, Interrupt()])
    assert signal.getsignal(signal.SIGTERM) == before
    assert not plugin.records.subscriptions
