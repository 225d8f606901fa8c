"""The printed report of a skipped step, and advice that helps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from support import Toy, batches, fit
from support.approved import assert_approved
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, OverflowLocator
from lightning_amp.findings import Op, OpKind, StepRecord, TriedRemedy
from lightning_amp.reports import Overflow
from lightning_amp.reports._overflow import _ADVICE, _advice_on

RECORD = StepRecord(7, 0, 2.0**16, 2.0**16, skipped=True, reason="loss", precision="fp16")
OP = Op(
    "mul", "/home/me/symptoms.py", 67, "return x * 1e5", "encoder.1", dtype="float16", shape=(4, 8), result="inf",
    largest_input=0.968, largest_in_fp32=96_800.0,
)  # fmt: skip
REPORT = Overflow(
    RECORD, 0, 1, 0, 7, (7, 7), 1, "forward", "encoder.1", OP, in_fp32="finite", parameters=("encoder.0.weight",),
    remedies=(
        TriedRemedy('AmpPrecision("bf16")', True), TriedRemedy('fp32_modules=["encoder.1"]', True),
        TriedRemedy("the loss in fp32", False),
    ),
)  # fmt: skip


def test_the_printed_reports() -> None:
    none: dict[str, Any] = {"operation": None, "remedies": ()}
    reports = {
        "forward": REPORT,
        "no remedy worked": replace(REPORT, remedies=(TriedRemedy('AmpPrecision("bf16")', False),)),
        "a batch with NaN": replace(
            REPORT, **none, rank=3, world_size=4, batch_idx=412, window=(411, 412), cause="batch",
            entries=(("['image']", 1, 602_112, (17, 0, 3, 9), "NaN"),), record=replace(RECORD, index=206),
        ),
        "a learning rate that was NaN": replace(
            REPORT, **none, cause="learning rate", parameter="net.0.weight", bad_rate=(13, math.nan), module="net.0"
        ),
    }  # fmt: skip
    assert_approved("overflow_locator", {case: str(report) for case, report in reports.items()})


def test_each_sentence_of_advice_is_chosen_by_an_operation() -> None:
    names = ("ctc_loss", "exp", "log", "div", "norm", "sqrt", "mul")
    ops = [
        Op(name, kind=kind, in_backward=back, is_sum=back and name == "mul", is_summed=after, largest_input=1e30)
        for name in names for kind in get_args(OpKind) for back in (False, True) for after in (False, True)
    ]  # fmt: skip
    ops += [replace(op, largest_input=1.0) for op in ops]
    chosen = {_advice_on(op, in_fp32) for op in (None, *ops) for in_fp32 in ("finite", "not finite")}
    assert chosen == set(_ADVICE)
    for op in ops:
        assert "not tried" in str(replace(REPORT, operation=op, in_fp32="not finite", remedies=()))


def test_plain_data_and_back() -> None:
    report = replace(REPORT, entries=(("['x']", 1, 2, (0, 1), "NaN"),), bad_rate=(3, math.nan))
    assert repr(Overflow.from_dict(report.as_dict())) == repr(report)
    assert json.loads(REPORT.to_json())["operation"]["name"] == "mul"
    assert REPORT.line == "symptoms.py:67"


def test_the_key_is_kind_module_and_line() -> None:
    assert REPORT.key == replace(REPORT, epoch=3, batch_idx=9, remedies=()).key == "forward, encoder.1, symptoms.py:67"
    assert replace(REPORT, cause="batch").key == "batch"


# -- advice that helps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaler", [2.0**24, 2.0**22, DynamicLossScaler(2.0**22, min_scale=2.0**22)], ids=["high", "static", "floor"]
)
def test_the_advised_scale_fits_and_is_not_too_low(scaler: Any) -> None:
    locator = OverflowLocator()
    plugin = AmpPrecision("fp16", scaler=scaler)
    fit(Toy, plugin, batches(4), callbacks=[locator])
    assert plugin.num_skipped == 4
    report = locator.reports[0]
    assert report.cause == "backward"
    assert report.fitting_scale is not None
    setting, works = report.remedies[0]
    advised = float(eval(setting.partition("=")[2].rstrip(")")))  # such as 2.0**13
    assert works
    for factor, skipped in ((1, 0), (16, 1)):
        plugin = AmpPrecision("fp16", scaler=advised * factor)
        fit(Toy, plugin, batches(1))
        assert plugin.num_skipped == skipped


@pytest.mark.needs("gru")
def test_a_scale_that_does_not_help_is_not_advised() -> None:
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
    assert "scaler=" not in str(report)
    assert 'AmpPrecision("bf16") (tried: works)' in str(report)
    advised = AmpPrecision("bf16")
    fit(Saturates, advised, data)
    assert advised.num_skipped == 0


def test_bf16_is_not_advised_in_bf16_for_a_gradient() -> None:
    """Two numbers are equal only in bfloat16. The report advises to compute them in fp32, which helps."""

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
    assert 'fp32_modules=["other"] (tried: works)' in str(report)
    assert "AmpPrecision" not in str(report)
    advised = AmpPrecision("bf16", fp32_modules=["other"])
    fit(Close, advised, data)
    assert (advised.num_steps, advised.num_skipped) == (1, 0)


# -- what "(tried: works)" means ---------------------------------------------------------------------------------------


def test_a_remedy_whose_loss_is_not_that_of_fp32_does_not_work() -> None:
    """In bf16 the loss is finite, but 0: the difference of two numbers that are equal in bfloat16."""

    class Cancels(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            out = self.net(batch)
            large = out * 0 + torch.ones((), dtype=out.dtype)
            near = large * (1 + 2.0**-9 if out.dtype == torch.float32 else 1.0)
            return ((near - large) * 1e5).float().mean() + (out * 1e6).float().mean() * 0

    locator = OverflowLocator()
    fit(Cancels, AmpPrecision("fp16", scaler=1.0), batches(1), callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.in_fp32) == ("loss", "finite")
    assert dict(report.remedies)['AmpPrecision("bf16")'] is False
    assert "(tried: works)" in str(report)
    assert "bf16" not in str(report)


def test_an_input_as_large_as_the_result_is_named() -> None:
    data = torch.ones(4, 8)
    data[2, 5] = 1e6
    locator = OverflowLocator()
    fit(Toy, AmpPrecision("fp16"), torch.utils.data.DataLoader(data, batch_size=4), callbacks=[locator])
    assert " from an input of 1e+06, fp16 ends at 65,504" in str(locator.reports[0])


def test_weights_that_grow_explain_a_step_whose_cause_no_replay_shows() -> None:
    taken = replace(REPORT, record=replace(RECORD, skipped=False), cause="not reproduced", operation=None)
    assert "fix: look at the learning rate" in str(taken)
    made_by_it = replace(taken, cause="weights", parameter="net.weight")
    assert "with the weights after it, `net.weight` is not finite" in str(made_by_it)
    assert "fix: a lower learning rate" in str(replace(taken, growth=("largest", 1.0, 1e25)))
