"""What a report says, and whether its advice helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Toy, batches, fit
from torch import Tensor, nn
from zoo.overflows import BadRow, fp16, with_bad

from lightning_amp import AmpPrecision, DynamicLossScaler, OverflowLocator
from lightning_amp.reports._overflow_report import OverflowReport


def test_the_scale_that_would_fit() -> None:
    locator = OverflowLocator()
    fit(Toy, AmpPrecision("fp16", scaler=2.0**24), batches(2), callbacks=[locator])
    report = locator.reports[0]
    assert report.cause == "backward"
    advised = float(eval(str(report).split("a loss scale of ")[1].split(" or below")[0]))  # such as 2**13
    assert advised == report.working_scale
    plugin = AmpPrecision("fp16", scaler=advised)
    fit(Toy, plugin, batches(1), callbacks=[locator])
    assert plugin.num_skipped == 0
    plugin = AmpPrecision("fp16", scaler=advised * 4)
    fit(Toy, plugin, batches(1), callbacks=[locator])
    assert plugin.num_skipped == 1


@pytest.mark.needs("gru")
def test_a_scale_that_fits_already_is_not_advised() -> None:
    """A huge input meets saturated gates: its weight gradient is 0 times infinity in fp16, and small in fp32."""

    class Saturates(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 8)

        def loss(self, batch: Tensor) -> Tensor:
            return self.cell(batch).float().square().mean()

    batch = torch.randn(4, 8)
    batch[0, 0] = 1e30
    data = torch.utils.data.DataLoader(batch, batch_size=4)
    locator = OverflowLocator()
    fit(Saturates, AmpPrecision("fp16", scaler=64.0), data, callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "backward"
    assert "which fits; something on the way to it does not" in str(report)
    assert "there by itself" not in str(report)
    advised = AmpPrecision("bf16")
    fit(Saturates, advised, data)
    assert advised.num_skipped == 0


@pytest.mark.parametrize("scaler", [2.0**22, DynamicLossScaler(2.0**22, min_scale=2.0**22)], ids=["static", "floor"])
def test_a_scale_that_does_not_fall_is_not_said_to(scaler: Any) -> None:
    locator = OverflowLocator()
    plugin = AmpPrecision("fp16", scaler=scaler)
    fit(Toy, plugin, batches(4), callbacks=[locator])
    assert plugin.num_skipped == 4
    report = str(locator.reports[0])
    assert "there by itself" not in report
    advised = float(eval(report.partition("a loss scale of ")[2].partition(" or below")[0]))  # such as 2**13
    plugin = AmpPrecision("fp16", scaler=advised)
    fit(Toy, plugin, batches(1))
    assert plugin.num_skipped == 0


def test_bf16_is_not_advised_in_bf16() -> None:
    class Explodes(Toy):
        def __init__(self) -> None:
            super().__init__(net=nn.Linear(8, 1))
            nn.init.ones_(self.net.weight)

        def loss(self, batch: Tensor) -> Tensor:
            return self.net(batch).float().sum()  # gradients of finite numbers would be taken

    data = torch.utils.data.DataLoader(torch.full((4, 8), 3e38), batch_size=4)
    locator = OverflowLocator()
    fit(Explodes, AmpPrecision("bf16"), data, callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.diagnosis.dtype) == ("forward", "bfloat16")
    assert "'fp32' holds no larger numbers than bfloat16" in str(report)
    assert "'bf16'" not in str(report)


def test_bf16_is_not_advised_in_bf16_for_a_gradient() -> None:
    """Two numbers that are the same in bfloat16 only: the advice is to compute them in fp32, which helps."""

    class Close(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 1)

        def loss(self, batch: Tensor) -> Tensor:
            with torch.no_grad():
                self.other.load_state_dict({"weight": torch.ones(1, 8), "bias": torch.zeros(1)})
            out = self.other(batch)
            return (out - self.other(batch * (1 + 1e-4)).detach()).float().square().sum().sqrt()

    data = torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=4)
    locator = OverflowLocator()
    fit(Close, AmpPrecision("bf16"), data, callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "backward"
    assert "`fp32_modules=['other']` (tried: works)" in str(report)
    assert "'bf16'" not in str(report)
    advised = AmpPrecision("bf16", fp32_modules=["other"])
    fit(Close, advised, data)
    assert (advised.num_steps, advised.num_skipped) == (1, 0)


class RootOfZero(Toy):
    """The derivative of a root at 0 is infinite, and times the 0 before it NaN, in every precision."""

    def loss(self, batch: Tensor) -> Tensor:
        out = self.net(batch).float()
        return out.square().mean() + (out - out.detach()).square().sum().sqrt()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_precision_is_advised_for_what_fp32_cannot_either(precision: str) -> None:
    locator = OverflowLocator()
    fit(RootOfZero, AmpPrecision(precision), batches(1), callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "backward"
    assert "no precision can help" in str(report)
    assert "'bf16'" not in str(report)
    assert ("the scaled backward alone" in str(report)) == (precision == "fp16")


def test_reports_of_older_checkpoints_still_load() -> None:
    locator = OverflowLocator()
    fit(BadRow, fp16(), with_bad(5), callbacks=[locator])
    (report,) = locator.reports
    values = report.as_dict()
    del values["precision"]
    assert OverflowReport.from_dict(values).precision == ""
