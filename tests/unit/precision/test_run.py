"""A run of the plugin leaves nothing behind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizers
from support import DEVICE, Toy, attributes, batches, quiet_trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_amp import AmpPrecision

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
    before, hooks, update = attributes(module), hooks_of_torch(), vars(module.mean)["update"]
    trainer = quiet_trainer(plugins=[plugin])
    with pytest.raises(KeyError, match="crash") if crashes else contextlib.nullcontext():
        getattr(trainer, name)(module, *[batches(2)] * (2 if name == "fit" else 1))
    assert attributes(module) == before
    assert hooks_of_torch() == hooks
    assert vars(module.mean)["update"] is update
    assert not torch.is_autocast_enabled(DEVICE)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())
    assert module.during[-1] != before  # while it ran there was something
