"""Rows 4 and 36: a loop may call the methods of the plugin's scaler, which do what the plugin does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Records, Toy, WithoutAutocast, assert_same, fit, weights
from support.promises import OPTIMIZERS, plain_sgd
from torch import Tensor

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.precision import unscale_

SCALERS: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: DynamicLossScaler(2.0**10, growth_interval=2),
    "torch's": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
    "static": lambda: 2.0**10,
}


def scaled(scaler: Any = 2.0**10) -> AmpPrecision:
    return WithoutAutocast("fp16", scaler=scaler)


class Manual(Toy):
    """Runs `step`, which gets the scaler if it is to call it by hand, else `None`."""

    def __init__(self, step: Any, optimizer: Any = plain_sgd, by_hand: bool = True) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.step, self.by_hand = step, by_hand

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.index = batch_idx
        self.optimizers().zero_grad()
        self.step(self, batch, getattr(self.trainer.precision_plugin, "scaler", None) if self.by_hand else None)

    def backward_of(self, loss: Tensor, scaler: Any) -> None:
        self.manual_backward(loss) if scaler is None else scaler.scale(loss).backward()


# -- the whole recipe ----------------------------------------------------------------------------


def half_of_it(module: Any, batch: Tensor, scaler: Any) -> None:
    module.backward_of(module.loss(batch), scaler)
    module.optimizers().step()


def accumulates(module: Any, batch: Tensor, scaler: Any) -> None:
    """Before the user's backward adds to them, all earlier gradients are brought to its scale."""
    module.backward_of(module.loss(batch), scaler)
    unscale_(module.trainer, module.optimizers())
    module.backward_of(module.loss(batch * 2), scaler)
    module.manual_backward(module.loss(batch * 3))
    module.backward_of(module.loss(batch * 4), scaler)
    module.optimizers().step()


def several_losses(module: Any, batch: Tensor, scaler: Any) -> None:
    losses = [module.loss(batch), module.loss(batch * 2)]
    if scaler is None:
        module.manual_backward(losses[0] + losses[1])
    else:
        one, (two,) = scaler.scale(loss for loss in (losses[0], [losses[1]]))
        (one + two).backward()
    module.optimizers().step()


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize(
    ("scaler", "optimizer"),
    [*((scaler, "sgd") for scaler in SCALERS), ("dynamic", "fused adamw"), ("torch's", "adamw")],
)
@pytest.mark.parametrize("step", [half_of_it, accumulates, several_losses])
@pytest.mark.few(8)
def test_a_loss_scaled_by_hand_equals_fp32(step: Any, optimizer: str, scaler: str) -> None:
    make, plugin = functools.partial(Manual, step, OPTIMIZERS[optimizer]), scaled(SCALERS[scaler]())
    trainer, reference = fit(make, plugin), fit(make)
    assert_same(trainer, reference)
    assert trainer.global_step == reference.global_step == plugin.num_steps == 8
    assert plugin.scaler.get_scale() == 2.0 ** (10 if scaler == "static" else 14)  # pyright: ignore


# -- what cannot be right ------------------------------------------------------------------------


def scales_twice(module: Any, batch: Tensor, scaler: Any) -> None:
    module.manual_backward(scaler.scale(module.loss(batch)) / 2)
    module.optimizers().step()


class ScalesTwice(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.trainer.precision_plugin.scaler.scale(self.loss(batch))  # pyright: ignore


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: Manual(scales_twice), r"Call `self.manual_backward\(loss\)`.*without `scaler"),
        (ScalesTwice, "without `scaler.scale`"),
    ],
    ids=["manual", "automatic"],
)
def test_a_loss_that_is_scaled_twice_is_an_error(make: Any, fix: str) -> None:
    module = make()
    before = weights(module)
    with pytest.raises(RuntimeError, match=f"loss scale twice.*{fix}"):
        fit(module, scaled())
    assert_same(module, before)


def steps_by_hand(module: Any, batch: Tensor, scaler: Any) -> None:
    module.backward_of(module.loss(batch), scaler)
    scaler.unscale_(module.optimizers())
    scaler.step(module.optimizers())


def updates_by_hand(module: Any, batch: Tensor, scaler: Any) -> None:
    module.backward_of(module.loss(batch), scaler)
    module.optimizers().step()
    scaler.update()


@pytest.mark.parametrize(("step", "method"), [(steps_by_hand, "step"), (updates_by_hand, "update")])
def test_a_step_or_an_update_by_hand_is_an_error(step: Any, method: str) -> None:
    plugin = scaled()
    with pytest.raises(RuntimeError, match=rf"`scaler.{method}`.*Call `step\(\)` of what `self"):
        fit(lambda: Manual(step), plugin)
    plugin.scaler.scale(torch.ones(()))  # after the run the scaler is the user's own again


def test_a_scaler_with_a_policy_of_its_own_is_refused() -> None:
    class OwnScaler(torch.amp.GradScaler):
        def update(self, new_scale: float | Tensor | None = None) -> None: ...

    with pytest.raises(ValueError, match="OwnScaler.*own `update`.*DynamicLossScaler"):
        AmpPrecision("fp16", scaler=OwnScaler("cpu"))


# -- what goes on as it was ----------------------------------------------------------------------


def penalty(module: Any, batch: Tensor, scaler: Any) -> None:
    """Follow torch's recipe for a gradient penalty: the user divides `torch.autograd.grad` of a scaled loss."""
    batch = batch.clone().requires_grad_()
    loss = module.loss(batch)
    factor = 1.0 if scaler is None else scaler.get_scale()
    outputs = loss if scaler is None else scaler.scale(loss)
    inputs = [batch, *module.net.parameters()] if module.index % 2 else batch
    gradients = torch.autograd.grad(outputs, inputs, create_graph=True)
    module.manual_backward(loss + 0.01 * sum((g / factor).square().sum() for g in gradients))
    module.optimizers().step()


@pytest.mark.parametrize("scaler", SCALERS)
def test_torchs_gradient_penalty(scaler: str) -> None:
    plugin = scaled(SCALERS[scaler]())
    assert_same(fit(lambda: Manual(penalty), plugin), fit(lambda: Manual(penalty)))
    assert plugin.num_steps == 8


def overflows_four_times(module: Any, batch: Tensor, scaler: Any) -> None:
    for _ in range(4):
        module.optimizers().zero_grad()
        module.backward_of(module.loss(batch), scaler)
        module.net[0].weight.grad[0] = torch.inf
        module.optimizers().step()


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_scale_falls_between_the_rounds_of_a_batch(by_hand: bool) -> None:
    records = Records()
    fit(lambda: Manual(overflows_four_times, by_hand=by_hand), scaled(DynamicLossScaler(2.0**16)), callbacks=[records])
    assert [record.scale for record in records.all][:4] == [2.0**16, 2.0**15, 2.0**14, 2.0**13]
