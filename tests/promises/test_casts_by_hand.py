"""A frozen half-precision part with casts by hand around it: a step repeated in fp32 computes it in fp32, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import FEATURES, assert_same, batches, fit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp import (
    AmpPrecision,
    DynamicLossScaler,
    GradientMonitor,
    MetricComparison,
    OverflowLocator,
    find_fp32_modules,
)

BF16 = torch.bfloat16
Features = Callable[[Any, Tensor], Tensor]


def fp16() -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(1024.0))


class Frozen(L.LightningModule):
    """A body in bfloat16, a table and a matrix in float16, and a trained head."""

    def __init__(self, features: Features, factor: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()).to(BF16).requires_grad_(False)
        self.table = nn.Embedding(4, FEATURES).half().requires_grad_(False)
        self.register_buffer("matrix", torch.randn(FEATURES, FEATURES).half())
        self.plain = [torch.randn(FEATURES, FEATURES).half()]  # a plain attribute, not a buffer
        self.head = nn.Linear(FEATURES, 1)
        self.features, self.factor = features, factor

    def loss(self, batch: Tensor) -> Tensor:
        return self.factor * (self.head(self.features(self, batch).float()).float() - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self) -> Any:
        return batches(3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05)


def positive(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def outside_autocast(module: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return module.body(x.to(BF16)).float()


def checkpointed(module: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: outside_autocast(module, y), module.head.weight * x, use_reentrant=False)


CASTS: dict[str, tuple[Features, Features]] = {
    "bfloat16": (lambda m, x: m.body(x.bfloat16()), lambda m, x: m.body(x)),
    "to": (lambda m, x: m.body(x.to(BF16)), lambda m, x: m.body(x)),
    "dtype of a weight": (lambda m, x: m.body(x.to(m.body[0].weight.dtype)), lambda m, x: m.body(x)),
    "functional": (lambda m, x: nn.functional.linear(x.half(), m.matrix), lambda m, x: x @ m.matrix.T),
    "plain tensor": (lambda m, x: x.half() @ m.plain[0].to(x.device), lambda m, x: x @ m.plain[0].to(x.device)),
    "embedding": (
        lambda m, x: m.table((x > 0).long()[:, 0]) * x.half(),
        lambda m, x: m.table((x > 0).long()[:, 0]) * x,
    ),
    "outside of autocast": (outside_autocast, lambda m, x: m.body(x)),
    "checkpointed": (checkpointed, lambda m, x: m.body(m.head.weight * x)),
}
"""The ways in which the step computes its features, each with its fp32 form."""


def in_fp32(module: Frozen, features: Features) -> Frozen:
    exact = copy.deepcopy(module).float()
    exact.plain, exact.features = [matrix.float() for matrix in module.plain], features
    return exact


@pytest.mark.parametrize("cast", CASTS)
def test_second_runs_are_in_fp32_and_change_no_bit(cast: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    features, exact = CASTS[cast]
    largest: dict[str, float] = {}

    class ByHand(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                copied = in_fp32(module, exact)
                copied.loss(batch).backward()
                largest.update((n, float(p.grad.abs().max())) for n, p in copied.named_parameters() if p.requires_grad)

    make = lambda: Frozen(features)  # noqa: E731
    monitor, comparison = GradientMonitor(by="parameter"), MetricComparison()
    trainer = fit(make, fp16(), callbacks=[ByHand(), monitor, comparison, OverflowLocator()])
    assert_same(trainer, fit(make, fp16()))

    assert {row.name: row.largest for row in monitor.table[:2]} == pytest.approx(largest, rel=1e-6)
    assert {row.name for row in monitor.table} == {"head.weight", "head.bias", "(all)"}
    copied = in_fp32(trainer.lightning_module, exact)
    with torch.no_grad():
        expected = torch.stack([copied.loss(batch) for batch in batches(3)]).mean()
    (row,) = comparison.table
    assert row.fp32 == pytest.approx(float(expected), rel=1e-6)
    assert 0 < abs(row.diff) < 0.01 * row.fp32
    has_note = "note: fp32 here leaves out casts to half precision (test_casts_by_hand.py:" in caplog.text
    assert has_note == (cast != "dtype of a weight")  # which is float32 there


def test_an_overflow_behind_a_cast_is_explained() -> None:
    locator = OverflowLocator(max_reports=1)
    fit(lambda: Frozen(CASTS["bfloat16"][0], 1e6), fp16(), callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.note) == ("backward", "")
    assert report.largest_gradient is not None


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_overflow_of_a_cast_by_hand_is_one_of_fp16(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    def features(module: Any, x: Tensor) -> Tensor:
        return (torch.ones_like(x).half() * 60_000 * 2 ** int(module.training)).float()

    locator = OverflowLocator()
    fit(lambda: Frozen(features), AmpPrecision(precision), callbacks=[locator, MetricComparison()])
    what, where, *_ = str(locator.reports[0]).splitlines()
    assert what == "Step 0 skipped (batch 0): fp16 overflow in the forward"
    assert where.startswith("  training_step: mul gave 120,000 from an input of 60,000, fp16 ends at 65,504 ")
    assert "note: fp32 here leaves out casts to half precision (test_casts_by_hand.py:" in caplog.text


def test_the_report_names_the_cast_that_its_run_in_fp32_leaves_out() -> None:
    locator = OverflowLocator(max_reports=1)
    fit(lambda: Frozen(lambda m, x: (1e8 * m.head.weight * x.float()).half()), fp16(), callbacks=[locator])
    assert locator.reports[0].in_fp32 == "finite"
    assert "out casts to half precision (test_casts_by_hand.py:" in locator.reports[0].note


def test_fp32_modules_are_searched_behind_a_cast() -> None:
    def make() -> L.LightningModule:
        torch.manual_seed(0)
        return Frozen(CASTS["bfloat16"][0])

    def data() -> L.LightningDataModule:
        rows: Any = batches(2).dataset
        return L.LightningDataModule.from_datasets(rows, rows, batch_size=4)

    found = find_fp32_modules(make, data, "fp16", tolerance=0.1, trainer_kwargs={"accelerator": "cpu"})
    assert list(found) == []
