"""A run of the plugin leaves nothing behind."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning as L
import pytest
import torch
import torch.optim.optimizer as torch_optimizers
from lightning.pytorch.trainer.states import TrainerFn
from support import Toy, attributes, batches, quiet_trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.casting import Choice
from lightning_amp.precision._run import Run
from lightning_amp.scaling import RecordLog

RUNS = ["fit", "validate", "test", "predict"]


class Everything(Toy):
    """Has everything that a run changes: metrics, steps, epoch ends, statistics, a weight that is used again."""

    def __init__(self, crashes: bool) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
        self.mean, self.crashes = MeanMetric(), crashes
        self.during: list[dict[str, set[str]]] = []

    def step(self, batch: Tensor, batch_idx: int) -> Any:
        self.during.append(attributes(self))
        if self.crashes and batch_idx == 1:
            raise KeyError("crash")
        self.mean.update(loss := self.loss(self.net[0](batch)))
        return loss

    training_step = validation_step = test_step = predict_step = step

    def end(self) -> None: ...

    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = end


def hooks_of_torch() -> list[dict[int, Any]]:
    return [
        dict(torch_optimizers._global_optimizer_pre_hooks),
        dict(torch_optimizers._global_optimizer_post_hooks),
    ]


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_on_the_module(name: str, crashes: bool) -> None:
    module, plugin = Everything(crashes), AmpPrecision("fp16", fp32_modules=["net.2"], eval_precision="bf16")
    before, hooks = attributes(module), hooks_of_torch()
    trainer = quiet_trainer(plugins=[plugin])
    with pytest.raises(KeyError, match="crash") if crashes else contextlib.nullcontext():
        getattr(trainer, name)(module, *[batches(2)] * (2 if name == "fit" else 1))
    assert attributes(module) == before
    assert hooks_of_torch() == hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert module.during[-1] != before  # while it ran there was something


def run(function: TrainerFn | None, module: L.LightningModule | None = None) -> Run:
    module = Toy() if module is None else module
    module.trainer = quiet_trainer()
    module.trainer.state.fn = function
    return Run(AmpPrecision("fp16"), module, Choice.of("fp16"), Choice.of("fp32"), ["net.2"])


def connect(run: Run) -> None:
    optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1)
    scaler = DynamicLossScaler()
    run.connect([optimizer], scaler, True, RecordLog())


@pytest.mark.parametrize("function", TrainerFn)
def test_only_a_fit_has_backwards_and_steps(function: TrainerFn) -> None:
    hooks = hooks_of_torch()
    it = run(function)
    assert it.steps is None  # there are no optimizers yet
    connect(it)
    assert it.fitting == (it.steps is not None) == (function == "fit")
    it.detach()
    assert hooks_of_torch() == hooks


def test_a_second_connect_replaces_the_fit() -> None:
    """Optimizers may be made anew during a fit."""
    hooks = hooks_of_torch()
    it = run(TrainerFn.FITTING)
    connect(it)
    first, watched = it.steps, len(hooks_of_torch()[0])
    connect(it)
    assert it.steps is not first
    assert len(hooks_of_torch()[0]) == watched == len(hooks[0]) + 1
    it.detach()
    assert hooks_of_torch() == hooks


def test_what_cannot_be_trained_may_be_evaluated() -> None:
    module = Toy()
    module.net[0].half()
    run(TrainerFn.VALIDATING, module).check(["nothing*"])
    with pytest.raises(ValueError, match="trainable parameters are float16"):
        run(TrainerFn.FITTING, module).check([])
    with pytest.raises(ValueError, match=r"nothing\*"):
        run(TrainerFn.FITTING).check(["nothing*"])
