"""One fit: optimizers whose step takes no closure, and what the output of a step is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Poison, Toy, assert_same, batches, fit
from torch import Tensor

from lightning_amp import AmpPrecision, DynamicLossScaler


class TakesNoClosure(torch.optim.Optimizer):
    """SGD, as it is written by whoever never needed a closure; with a keyword of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.got: list[Any] = []

    @torch.no_grad()
    def step(self, *, something: Any = None) -> Any:  # type: ignore[override]
        self.got.append(something)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
        return "stepped"


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


class Steps(Toy):
    """Steps by hand, or with the closure handed on by hand; `keywords` go to the optimizer."""

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


@pytest.mark.usefixtures("where_flags_live")
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_optimizer_that_takes_no_closure_trains_and_skips_as_any_other(precision: str, manual: bool) -> None:
    ours, reference = plugin(precision), plugin(precision)
    trainer = fit(lambda: Steps(TakesNoClosure, manual), ours, callbacks=[Poison(gradient=[0, 3])])
    assert_same(trainer, fit(lambda: Steps(sgd, manual), reference, callbacks=[Poison(gradient=[0, 3])]))
    assert (ours.num_steps, ours.num_skipped) == (6, 2)
    assert ours.state_dict() == reference.state_dict()
    assert trainer.lightning_module.outputs.count("stepped") == 6
    assert len(trainer.optimizers[0].got) == 6  # it is not even called


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_keywords_of_a_step_reach_the_optimizer(precision: str, manual: bool) -> None:
    trainer = fit(lambda: Steps(TakesNoClosure, manual, something=3), plugin(precision), batches(2))
    assert trainer.optimizers[0].got == [3, 3]
    assert trainer.lightning_module.outputs == ["stepped"] * 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_skipped_step_returns_what_its_closure_did(precision: str) -> None:
    """The loss, as a step that is applied."""
    outputs = fit(lambda: Steps(sgd, False), plugin(precision), batches(2), callbacks=[Poison(gradient=[0])])
    first, second = outputs.lightning_module.outputs
    assert first.isfinite()
    assert second.isfinite()
