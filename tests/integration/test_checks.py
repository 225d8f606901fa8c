"""Rows 13, 17, 25, 26: what can be known to be wrong is said when the Trainer attaches, with names and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FEATURES, Toy, batches, fit
from promises import Plugins, plain_sgd, promise
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Never(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        raise AssertionError("reached the first batch")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters(precision: str, dtype: torch.dtype) -> None:
    module = Never()
    module.net[2].to(dtype)
    with pytest.raises(ValueError, match=r"`net.2.weight`, `net.2.bias`.*Call `.float\(\)`"):
        fit(module, getattr(Plugins(True), precision)())


@promise(13, stock="Attempting to unscale FP16 gradients", raises=(ValueError, RuntimeError))
def test_frozen_half_parameters_are_fine(plugins: Plugins) -> None:
    module = Toy(lambda params: plain_sgd([p for p in params if p.requires_grad]))
    module.net[0].half()
    module.net[0].requires_grad_(not plugins.ours)  # Lightning: shows how it fails where they are not frozen
    fit(module, plugins.fp16())


class OwnScaler(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.my_scaler = torch.amp.GradScaler("cpu")


class OwnAutocast(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.loss(batch)


class OwnLoss(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.BCELoss()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (OwnScaler, "its own `GradScaler` .`self.my_scaler`"),
        (OwnAutocast, "`training_step` uses `torch.autocast` itself"),
        (OwnLoss, "`nn.BCELoss` .`criterion`.*BCEWithLogitsLoss"),
    ],
)
def test_said_once(module: type[Toy], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        fit(module, Plugins(True).bf16())
    assert sum("lightning_amp" in str(w.message) for w in caught) == 1


def test_a_healthy_module_is_not_bothered() -> None:
    fit(Toy, Plugins(True).bf16())  # warnings are errors


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@promise(26, stock="same dtype|dtype", raises=RuntimeError)
def test_float64_batches(plugins: Plugins, precision: str) -> None:
    data = DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4)
    trainer = fit(Toy, getattr(plugins, precision)(), data)
    assert trainer.global_step == 2


def test_float64_modules_keep_their_batches() -> None:
    seen: list[torch.dtype] = []

    class Double(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen.append(batch.dtype)
            return (self.net(batch).float() ** 2).mean()

    module = Double()
    module.net.double()
    fit(module, Plugins(True).bf16(), DataLoader(torch.randn(8, FEATURES, dtype=torch.float64), batch_size=4))
    assert seen == [torch.float64] * 2


def test_batches_are_not_copied_for_nothing() -> None:
    batch = next(iter(batches(1)))
    from lightning_amp.precision import _inputs

    assert _inputs.downcast(batch, Toy()) is batch
