"""Both sides of a comparison see the same batches, and a failure of one side ends the comparison only."""

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
