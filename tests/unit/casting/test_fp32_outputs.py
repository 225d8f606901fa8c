"""Outputs of evaluation steps, and epoch-end hooks in their context."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_amp.casting import EpochEnd, Fp32Outputs, Overrides


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[bool] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"out": self.layer(batch).bfloat16()}

    def on_validation_epoch_end(self) -> None:
        self.seen.append(torch.is_autocast_enabled("cpu"))


def test_outputs_of_a_step() -> None:
    module = Model()
    before = dict(vars(module))
    with Overrides([Fp32Outputs(module, "validation_step")]):
        assert module.validation_step(torch.ones(1, 2), 0)["out"].dtype == torch.float32
        assert list(inspect.signature(module.validation_step).parameters) == ["batch", "batch_idx"]
        assert is_overridden("validation_step", module)
    assert vars(module) == before
    with pytest.raises(KeyError, match="x"), Overrides([Fp32Outputs(module, "validation_step")]):
        raise KeyError("x")
    assert vars(module) == before


def test_epoch_end_runs_once_in_its_context() -> None:
    module = Model()
    before, entered = set(vars(module)), []

    @contextmanager
    def context() -> Any:
        entered.append(True)
        with torch.autocast("cpu", torch.bfloat16):
            yield

    EpochEnd(module, "on_validation_epoch_end", context).install()
    assert is_overridden("on_validation_epoch_end", module)
    module.on_validation_epoch_end()
    assert set(vars(module)) == before
    module.on_validation_epoch_end()
    assert module.seen == [True, False]
    assert len(entered) == 1
