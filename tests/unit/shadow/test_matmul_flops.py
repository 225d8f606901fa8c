"""The share of each dtype in the matrix products of a step is right, and counting leaves no trace."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from support import FEATURES, Toy, batches, fit
from torch import Tensor

from lightning_amp import AmpPrecision
from lightning_amp.shadow import matmul_flops


class Counting(L.Callback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self.found.append(matmul_flops(trainer, pl_module, batch, batch_idx))


def shares(module: Any, precision: Any, **kwargs: Any) -> dict[str, float]:
    counting = Counting()
    fit(module, AmpPrecision(precision, **kwargs), callbacks=[counting], max_steps=2)
    assert counting.found[0] == counting.found[1]
    return counting.found[0]


@pytest.mark.parametrize(("precision", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_one_precision(precision: str, name: str) -> None:
    assert shares(Toy, precision) == {name: 1.0}


def test_a_head_in_fp32() -> None:
    """Two products of the first layer, whose input needs no gradient, and three of the head."""
    found = shares(Toy, "bf16", fp32_modules=["net.2"])
    first, head = 2 * FEATURES * 16, 3 * 16 * 1
    assert found == pytest.approx({"bfloat16": first / (first + head), "float32": head / (first + head)})
    assert list(found) == ["bfloat16", "float32"]
    assert sum(found.values()) == pytest.approx(1.0)


def test_a_step_that_fails_is_closed() -> None:
    """Its exception is raised, and the next step is counted."""

    class Fails(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            if len(batch) == 3:
                raise RuntimeError("three")
            return super().loss(batch)

    class Tries(Counting):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            with pytest.raises(RuntimeError, match="three"):
                matmul_flops(trainer, pl_module, batch[:3], batch_idx)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    tries = Tries()
    fit(Fails, AmpPrecision("bf16"), batches(2), callbacks=[tries])
    assert tries.found == [{"bfloat16": 1.0}] * 2
