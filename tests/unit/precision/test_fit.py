"""One fit: arguments and results of optimizer steps, callbacks that join it, and the contexts of its steps."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support import DEVICE, FEATURES, Manual, Toy, assert_same, batches, fit, scaled_fp32
from support.promises import fused_adamw, plain_sgd
from torch import Tensor, nn
from zoo.toy import TakesNoClosure

from lightning_amp import AmpPrecision, DynamicLossScaler


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


class Steps(Toy):
    """Steps by hand, or passes the closure on itself; `keywords` go to the optimizer."""

    def __init__(self, optimizer: Any, manual: bool, **keywords: Any) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = not manual
        self.keywords, self.outputs = keywords, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.outputs.append(optimizer.step(**self.keywords))
        return None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.outputs.append(optimizer.step(closure=optimizer_closure, **self.keywords))


PRECISIONS = ["fp16", "bf16", "fp32"]


def plugin(precision: str) -> AmpPrecision:
    return AmpPrecision(precision, scaler=DynamicLossScaler(64.0) if precision == "fp16" else None)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_keywords_of_a_step_reach_the_optimizer(precision: str, manual: bool) -> None:
    trainer = fit(lambda: Steps(TakesNoClosure, manual, something=3), plugin(precision), batches(2))
    assert trainer.optimizers[0].got == [3, 3]
    assert trainer.lightning_module.outputs == ["stepped"] * 2


class Closure(Manual):
    """Notes the autocast state of its forward and its backward."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            self.seen.append(self.net(batch).dtype)
            self.manual_backward(loss := self.loss(batch))
            return loss

        optimizer.step(closure=closure)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.seen.append(torch.is_autocast_enabled(DEVICE))
        super().backward(loss, *args, **kwargs)


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_users_closure_runs_under_autocast_and_its_backward_does_not(precision: str, dtype: torch.dtype) -> None:
    module = fit(Closure, plugin(precision), batches(2)).lightning_module
    assert module.seen == [dtype, False] * 2


class OwnLoss(Manual):
    """Has a second loss and optimizer, which the plugin does not scale."""

    def __init__(self) -> None:
        super().__init__(lambda _: sgd(self.net.parameters()))
        self.extra = nn.Linear(FEATURES, 1)
        self.own = [sgd(self.extra.parameters())]  # a list: Lightning does not see it

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        loss.register_hook(self.fail)
        with pytest.raises(MemoryError):
            self.manual_backward(loss)
        self.own[0].zero_grad()
        self.extra(batch).float().mean().backward()
        self.own[0].step()

    def fail(self, gradient: Tensor) -> None:
        raise MemoryError


def test_a_backward_that_fails_has_ended() -> None:
    """Otherwise the plugin would take all later gradients for scaled ones, and refuse to step."""
    assert_same(fit(OwnLoss, scaled_fp32(init_scale=64.0), batches(2)), fit(OwnLoss, None, batches(2)))


class ComesLate(L.Callback):
    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.callbacks.append(SeesGradients(self.calls))


class SeesGradients(L.Callback):
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self.calls.append(trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.calls.append(trainer.fit_loop.batch_idx)


@pytest.mark.parametrize("optimizer", [plain_sgd, fused_adamw])
def test_callbacks_that_come_late_are_called(optimizer: Any) -> None:
    late = ComesLate()
    fit(lambda: Toy(optimizer), AmpPrecision("fp32"), callbacks=[late])
    assert late.calls == [4, 4, 5, 5, 6, 6, 7, 7]


class TrainsInValidation(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.append(self.net(batch).dtype)
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.trainer.strategy.training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return batches(1)


def test_a_training_step_in_validation_leaves_training_as_it_is() -> None:
    """The sanity check comes first."""
    module = TrainsInValidation()
    fit(module, AmpPrecision("bf16", eval_precision="fp32"), batches(2))
    assert module.seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("name", ["autocast_context_manager", "forward_context"])
def test_a_plugin_with_an_autocast_of_its_own_makes_it_for_each_step(name: str) -> None:
    made: list[str] = []

    def make(self: AmpPrecision) -> Any:
        made.append(name)
        return getattr(AmpPrecision, name)(self)

    fit(Toy, type("Own", (AmpPrecision,), {name: make})("bf16"), batches(5))
    assert len(made) == 5
