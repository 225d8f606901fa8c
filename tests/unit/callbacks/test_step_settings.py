"""A hyperparameter that is not finite is named before a step uses it; the step is taken as without the callback."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import Toy, assert_same, batches, fit, stock_fp32
from torch import Tensor

from lightning_amp import AmpPrecision, OverflowLocator
from lightning_amp.callbacks._step_settings import StepSettings


def said(module: Callable[[], Any], plugin: Callable[[], Any] = lambda: AmpPrecision("fp32")) -> list[str]:
    """Return the warnings of a run, all of which must come while the weights are still finite."""
    texts, modules = list[str](), list[L.LightningModule]()

    def make() -> Any:
        modules[:] = [module()]
        return modules[0]

    def note(_: OverflowLocator, found: list[str]) -> None:
        assert not found or all(bool(p.isfinite().all()) for p in modules[0].parameters()), "said too late"
        texts.extend(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverflowLocator, "_warn", note)
        watched = fit(make, plugin(), callbacks=[OverflowLocator()])
    assert_same(watched, fit(module, plugin()))
    return texts


def scheduled(function: Any, tensor: bool = False) -> Any:
    def make() -> Toy:
        lr = torch.tensor(0.1) if tensor else 0.1
        return Toy(
            lambda params: torch.optim.SGD(params, lr=lr),
            schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, function),
        )

    return make


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_learning_rate_of_a_schedule_is_named_before_its_step(value: float, tensor: bool) -> None:
    (text,) = said(scheduled(lambda step: 1.0 if step < 3 else value, tensor))
    what = "NaN" if math.isnan(value) else "infinite"
    assert text.startswith(
        f"The optimizer (SGD): `lr` is {what}, as `LambdaLR` has set it, by the function at test_step_settings.py:"
    )
    assert text.endswith(
        "Step 3 is about to use it, in any precision. Correct it, and go back to a checkpoint from before that step."
    )


class SetsIt(Toy):
    """The learning rate becomes NaN in the middle of a step, at one of the places where user code runs."""

    where = ""

    def __init__(self, where: str, fused: bool = False, **kwargs: Any) -> None:
        self.where = where
        super().__init__(lambda params: torch.optim.AdamW(params, lr=0.01, fused=fused), **kwargs)

    def break_it(self, where: str) -> None:
        if where == self.where and self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 5:
            self.trainer.optimizers[0].param_groups[0]["lr"] = math.nan

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.break_it("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.break_it("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.break_it("on_before_optimizer_step")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.break_it("optimizer_step")
        super().optimizer_step(*args, **kwargs)


@pytest.mark.parametrize("where", ["training_step", "on_after_backward", "on_before_optimizer_step", "optimizer_step"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_set_in_the_middle_of_a_step_is_named_before_the_step_uses_it(where: str, fused: bool) -> None:
    (text,) = said(lambda: SetsIt(where, fused))
    assert text.startswith("The optimizer (AdamW): `lr` is NaN. Step 4 is about to use it")


def test_a_rate_set_in_manual_optimization() -> None:
    class Manual(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx == 5:
                optimizer.param_groups[0]["lr"] = math.nan
            optimizer.step()

    (text,) = said(Manual)
    assert "`lr` is NaN. Step 5 is about to use it" in text


@pytest.mark.parametrize("name", ["weight_decay", "eps", "betas"])
def test_other_hyperparameters(name: str) -> None:
    class Changed(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": [p], "lr": 0.01} for p in self.parameters()])

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 2:
                group = self.trainer.optimizers[0].param_groups[2]
                group[name] = (math.nan, 0.9) if name == "betas" else math.inf

    (text,) = said(Changed)
    what = "NaN" if name == "betas" else "infinite"
    said_as = "betas[0]" if name == "betas" else name
    assert text.startswith(f"The optimizer (AdamW, parameter group 2): `{said_as}` is {what}. Step 3 is about to")


def test_a_step_that_is_skipped_uses_nothing() -> None:
    """The warning would come in the next step, if the value were still bad."""

    class Skips(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            bad = batch_idx == 3
            self.trainer.optimizers[0].param_groups[0]["lr"] = math.nan if bad else 0.1
            return self.loss(batch) * (math.inf if bad else 1.0)

    assert said(Skips) == []


def test_under_another_plugin_it_is_named_before_the_batch() -> None:
    module = scheduled(lambda step: 1.0 if step < 3 else math.nan)
    (text,) = said(module, stock_fp32)
    assert "The next step is about to use it" in text


def test_the_report_of_the_weights_says_which_step_it_was() -> None:
    locator = OverflowLocator()
    module = scheduled(lambda step: 1.0 if step < 3 else math.nan)
    with pytest.warns(UserWarning, match="`lr` is NaN"):
        fit(module, AmpPrecision("fp32"), callbacks=[locator])
    report = locator.reports[0]
    assert (report.cause, report.record.index, report.note) == ("weights", 4, "`lr` was NaN in step 3")


@pytest.mark.parametrize(
    "function", [lambda step: step / 10, lambda step: 0.0, lambda step: 1 / (1 + step), lambda step: 1e-30]
)
def test_usual_schedules_cause_no_warning(function: Any) -> None:
    assert said(scheduled(function)) == []


def test_a_negative_rate_and_unusual_groups_cause_no_warning() -> None:
    class Two(Toy):
        def configure_optimizers(self) -> Any:
            one = torch.optim.SGD(self.net[0].parameters(), lr=0.01, momentum=0.9, maximize=False)
            one.param_groups[0]["lr"] = -0.01
            two = [{"params": [p], "lr": 0.1, "betas": (0.9, 0.99)} for p in self.net[2].parameters()]
            return torch.optim.SGD([*one.param_groups, *two], lr=0.1)

    assert said(Two) == []


class OnADevice(torch.Tensor):
    """A scalar that claims to be on a device. Reading it there would wait for the device."""

    device = torch.device("cuda", 0)

    def __float__(self) -> float:
        raise AssertionError("waits for the device")

    def detach(self) -> Tensor:
        return self.as_subclass(torch.Tensor).detach()


def test_a_value_on_a_device_is_read_later() -> None:
    trainer = fit(Toy, AmpPrecision("fp32"), batches(1))
    (optimizer,) = trainer.optimizers
    settings = StepSettings()
    for step, value in enumerate([0.1, math.nan, math.nan]):
        optimizer.param_groups[0]["lr"] = torch.tensor(value).as_subclass(OnADevice)
        assert settings.look(trainer, optimizer, step) == []
    first, second = settings.read(trainer)
    assert first[0] == second[0]
    assert "Step 1 has used it" in first[1]
    assert settings.first == "`lr` was NaN in step 1"
    assert settings.read(trainer) == []
