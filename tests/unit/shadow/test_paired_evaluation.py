"""Both sides of a comparison see the same batches. The pass in fp32 is upcast and uncompiled; its failure ends it."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo.validated import Fails, Model, count, data, fit, make_trainer, values

from lightning_amp.callbacks._metric_comparison import MetricComparison

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]


@pytest.mark.parametrize(("limit", "batches"), [(None, 4), (1, 1), (3, 3), (9, 4), (0.5, 2), (0.1, 1), (1.0, 4)])
@pytest.mark.few(3)
def test_limit_batches_limits_both_sides(limit: Any, batches: int) -> None:
    comparison = MetricComparison(limit_batches=limit)
    trainer = fit(comparison)
    assert values(comparison, "batches", "amp") == values(comparison, "batches", "fp32") == [batches] * 2
    assert values(comparison, "autocast", "amp") == [1.0, 1.0]
    assert float(trainer.callback_metrics["batches"]) == 4
    assert 0.0 < abs(values(comparison, "val_loss", "relative_diff")[0]) < 0.05


def test_share_of_a_loader_without_length() -> None:
    class Stream(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.randn(6, 4))

    trainer = make_trainer(MetricComparison(limit_batches=0.5), num_sanity_val_steps=0)
    with pytest.raises(ValueError, match="needs loaders with a length, got 0.5"):
        trainer.fit(Model(), data(), DataLoader(Stream(), batch_size=2))
    comparison = MetricComparison(limit_batches=2)
    make_trainer(comparison, num_sanity_val_steps=0).fit(Model(), data(), DataLoader(Stream(), batch_size=2))
    assert values(comparison, "batches", "amp") == values(comparison, "batches", "fp32") == [2.0, 2.0]


@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_the_shadow_is_free_after_each_validation(fails: bool) -> None:
    buffers: list[Any] = []

    class Watched(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch).square().mean())  # alike on both sides: nobody looks again

        def on_validation_epoch_end(self) -> None:
            buffers.append(weakref.ref(self.net[0].running_mean))
            if fails and type(self.trainer) is not pl.Trainer:
                raise torch.OutOfMemoryError

    module = Watched()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(MetricComparison(limit_batches=1), module)
        assert len(buffers) == (5 if fails else 7)  # the sanity check's, and of each validation AMP, fp32 and its copy
        assert {id(buffer()) for buffer in buffers} <= {id(None), id(module.net[0].running_mean)}
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["validation_step", "on_validation_epoch_end"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), RuntimeError("CUDA error: out of memory"), RuntimeError("can't allocate memory")],
)
@pytest.mark.few(3)
def test_out_of_memory_drops_this_comparison(error: Exception, where: str) -> None:
    comparison = MetricComparison()
    with pytest.warns(UserWarning, match="out of memory in the fp32 pass of epoch 1: .* dropped") as caught:
        trainer = fit(comparison, Fails(error, (1, 2), where), max_epochs=4)
    assert count(caught) == 1
    assert trainer.current_epoch == 4
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == [0, 3]


@pytest.mark.parametrize("where", ["validation_step", "on_validation_epoch_end"])
def test_another_error_ends_the_comparisons_of_the_run(where: str) -> None:
    comparison = MetricComparison()
    with pytest.warns(UserWarning, match=r"second time \(KeyError: 'once'\)\. Comparisons are off") as caught:
        trainer = fit(comparison, Fails(KeyError("once"), (1,), where), max_epochs=4)
    assert count(caught) == 1
    assert trainer.current_epoch == 4
    assert [row.epoch for row in comparison.table if row.metric == "val_loss"] == [0]
    fit(comparison, max_epochs=1)  # a new run tries again
    assert len(comparison.table) == 3


# -- the evaluation pass in fp32 ---------------------------------------------------------------------------------------


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
