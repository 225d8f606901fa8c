"""The contexts of steps, and the precision of each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Toy, batches, fit
from torch import Tensor

from lightning_amp import AmpPrecision


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


# -- the contexts alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["autocast_context_manager", "forward_context"])
def test_a_plugin_with_an_autocast_of_its_own_makes_it_for_each_step(name: str) -> None:
    made: list[str] = []

    def make(self: AmpPrecision) -> Any:
        made.append(name)
        return getattr(AmpPrecision, name)(self)

    fit(Toy, type("Own", (AmpPrecision,), {name: make})("bf16"), batches(5))
    assert len(made) == 5
