"""A run in fp32 corrects a diagnosis. `tests/promises/test_diseases_named.py` has all faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from multi_rank.ranks import Infinite
from support import Toy, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from zoo.faults import Net, Table, holes, mse, plain_data, through
from zoo.overflows import BadRow, fp16, with_bad

from lightning_amp import AmpPrecision, OverflowLocator
from lightning_amp.causes.overflow._blame import key_without_fp32
from lightning_amp.tracing import Diagnosis, OperationWatch


def test_the_same_cause_has_the_same_key_in_each_batch() -> None:
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(1, 4), callbacks=[locator])
    assert [report.is_repeated for report in locator.reports] == [False, True]


def test_causes_without_an_operation_are_told_apart_by_their_module() -> None:
    watch = OperationWatch(nn.Identity(), "nobody.py")
    keys = {key_without_fp32(Diagnosis("backward", module=name, parameter="w"), watch) for name in ("a", "b", "a")}
    assert len(keys) == 2


def test_holes_in_the_labels_that_are_masked_are_not_to_blame() -> None:
    def loss(module: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = module.encoder(x).float()
        return ((out - y)[y.isfinite()] / (out * 0).sum()).mean()

    locator = OverflowLocator(max_reports=1)
    fit(lambda: Net(loss), AmpPrecision("bf16"), holes(False), callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "loss"
    assert report.diagnosis.operation is not None
    assert (report.diagnosis.operation.name, report.diagnosis.operation.kind) == ("div", "zero")
    assert report.diagnosis.entries == ()


def test_holes_in_the_labels_that_are_not_masked_are_to_blame() -> None:
    def loss(module: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (module.encoder(batch[0]).float() - batch[1]).square().mean()

    locator = OverflowLocator(max_reports=1)
    fit(lambda: Net(loss), AmpPrecision("bf16"), holes(False), callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.diagnosis.entries[0][0]) == ("batch", "[1]")


@pytest.mark.filterwarnings("ignore:.*Before the first step")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_buffer_is_named(precision: str) -> None:
    locator = OverflowLocator(max_reports=1)
    module = Net(through("positions"), positions=Table(cured=False))
    fit(lambda: module, AmpPrecision(precision), plain_data(), callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.diagnosis.parameter) == ("weights", "positions.table")


def test_an_infinity_that_does_not_show_in_the_loss_is_found() -> None:
    """1 / (1 + inf) is 0, and so is every gradient."""

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            speed = x / x.detach().abs().max() * 300
            return x / (1 + speed * speed)

    def loss(module: Net, batch: Tensor) -> Tensor:
        return through("gate")(module, batch) * (1e6 if module.global_step == 0 else 1)

    locator = OverflowLocator(max_reports=1)
    fit(lambda: Net(loss, gate=Gate()), AmpPrecision("fp16"), plain_data(), callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.diagnosis.module) == ("forward", "gate")
    assert any(r.kind == "fp32_modules" and r.worked for r in report.remedies)


class MadeLast(Toy):
    """No operation of the step takes the result of the Function."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch).float().square().mean()
        return Infinite.apply(loss) if batch_idx == 1 else loss


def test_a_function_that_makes_the_loss_is_named() -> None:
    locator = OverflowLocator()
    fit(MadeLast, fp16(), callbacks=[locator])
    (found,) = locator.reports
    assert found.diagnosis.operation is not None
    assert (found.diagnosis.operation.name, found.diagnosis.operation.code) == (
        "Infinite",
        "return gradient * torch.inf",
    )


def test_a_healthy_run_has_no_report() -> None:
    locator = OverflowLocator()
    data = DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4)
    fit(lambda: Net(lambda module, batch: mse(module, batch[0])), AmpPrecision("bf16"), data, callbacks=[locator])
    fit(Toy, AmpPrecision("bf16"), callbacks=[locator])
    assert locator.reports == []
