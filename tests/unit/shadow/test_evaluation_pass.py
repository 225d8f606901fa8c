"""An evaluation pass is upcast and uncompiled, and refuses objects that cannot be copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo.validated import Model, data, fit, make_trainer, values

from lightning_amp.callbacks._metric_comparison import MetricComparison

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]


class Features(Model):
    """Logs the dtype of its batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch["x"][0]
        self.log("val_loss", self.net(x).square().mean(), batch_size=4)
        self.log("bits", float(torch.finfo(x.dtype).bits), batch_size=4)
        self.log("class_id", batch["y"].float().mean(), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["x"][0]).square().mean()


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_batches_are_upcast_for_fp32_only(dtype: torch.dtype, limit: int | None) -> None:
    batches = [{"x": (x.to(dtype),), "y": torch.tensor(3)} for x in data()]
    comparison = MetricComparison(limit_batches=limit)
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    make_trainer(comparison).fit(Features(), loader, loader)
    assert values(comparison, "bits", "amp") == [16.0, 16.0]
    assert values(comparison, "bits", "fp32") == [32.0, 32.0]
    assert values(comparison, "class_id", "diff") == [0.0, 0.0]
    assert 0.0 < abs(values(comparison, "val_loss", "relative_diff")[0]) < 0.05
    assert batches[0]["x"][0].dtype == dtype


def test_frozen_half_precision_weights_are_upcast_for_fp32_only() -> None:
    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4).bfloat16().requires_grad_(False)
            self.register_buffer("shift", torch.zeros(4, dtype=torch.bfloat16))

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            assert self.shift.dtype == self.body.weight.dtype
            self.log("bits", float(torch.finfo(self.shift.dtype).bits))
            self.log("val_loss", self.net(self.body(batch) + self.shift).square().mean())

    comparison, module = MetricComparison(), Frozen()
    fit(comparison, module)
    assert module.body.weight.dtype == torch.bfloat16
    assert values(comparison, "bits", "fp32") == [32.0, 32.0]
    assert 0.0 < abs(values(comparison, "val_loss", "relative_diff")[0]) < 0.05


@pytest.mark.parametrize("how", [pytest.param("lightning module", marks=pytest.mark.slow), "function"])
def test_the_shadow_compiles_nothing(how: str) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    @torch.compile(backend=backend)
    def penalty(weight: Tensor) -> Tensor:
        return weight.square().sum() + weight.matmul(weight.T).sum()

    class WithFunction(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("penalty", penalty(self.net.weight))

    results: list[Any] = []
    comparison = MetricComparison()
    for callbacks in ([], [comparison]):
        calls.clear()
        torch.compiler.reset()
        torch.manual_seed(0)
        module: Any = Model() if how == "lightning module" else WithFunction()
        compiled: Any = torch.compile(module, backend=backend) if how == "lightning module" else module
        make_trainer(*callbacks).fit(compiled, data(), data())
        results.append((len(calls), {name: value.tolist() for name, value in module.state_dict().items()}))
    assert results[0][0] > 0
    assert results[0] == results[1]
    assert values(comparison, "autocast", "diff") == [1.0, 1.0]
