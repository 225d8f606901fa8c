"""The text of a report, and whether its advice helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Toy, batches, fit
from support.skips import EXP, report
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler, OverflowLocator
from lightning_amp.findings import Remedy, StepRecord
from lightning_amp.tracing import Operation


def test_a_whole_report() -> None:
    remedies = (Remedy("bf16", (), True), Remedy("fp32_modules", ("head",), False))
    assert str(report("forward", EXP, remedies=remedies, parameters=("head.weight",))) == (
        "step 0 was skipped: epoch 0, batch 3, loss scale 2**16\n"
        "  cause: the forward: the result of `exp` in `head` (Contrast), float16 [4, 4], is not finite; in fp32 it is"
        " finite, up to 199,000; the largest finite input is 12.2\n"
        '  line: losses.py:75 "log_z = torch.exp(sim).sum(-1)"\n'
        "  non-finite gradients: `head.weight`\n"
        "  try: 'bf16', which has the range of fp32 (tried: works); or subtract the maximum before the exponential"
        " (`torch.logsumexp`, `log_softmax`). Lowering the loss scale cannot help"
    )


def test_the_peculiarity_of_an_operation_stands_beside_its_result_in_fp32() -> None:
    zero = Operation("div", dtype="float16", shape=(3,), kind="zero", index=(1,), count=2, largest_in_fp32=4.0)
    assert (
        "is not finite: a divisor is 0, the first at [1], which it is not in fp32; in fp32 it is finite, up to 4"
        in str(report("loss", zero))
    )
    either = Operation("softmax", dtype="float32", shape=(2, 3), kind="masked", index=(1,), count=1)
    assert "is not finite, nor is it in fp32: a row is masked entirely, all of it minus infinity at [1]" in str(
        report("loss", either, "not finite")
    )


def test_a_gradient_that_is_cast_back() -> None:
    cast = Operation("float", dtype="float16", shape=(4, 1), in_backward=True)
    assert "the gradient, which that line casts back to float16 [4, 1], is not finite" in str(report("backward", cast))


def test_the_operation_whose_result_was_rounded_is_named() -> None:
    log = Operation("log", "gan.py", 10, "torch.log(1 - p)", dtype="float16", shape=(4,), kind="zero", count=1)
    values = ("sigmoid", 'gan.py:9 "p = torch.sigmoid(x)"')
    text = str(report("loss", log, remedies=(Remedy("source in fp32", values * 2, True),)))
    assert (
        '\n  line: gan.py:10 "torch.log(1 - p)"\n'
        '  before it: the result of `sigmoid` in gan.py:9 "p = torch.sigmoid(x)"'
        " is rounded to half precision, so that the argument of `log` is 0\n" in text
    )
    assert "try: `.float()` on the inputs of `sigmoid` (tried: works). Lowering" in text
    same = ("sigmoid", 'gan.py:10 "torch.log(1 - p)"')
    text = str(report("loss", log, remedies=(Remedy("source in fp32", same * 2, True),)))
    assert "before it: the result of `sigmoid` is rounded" in text
    failed = str(report("loss", log, remedies=(Remedy("source in fp32", values * 2, False),)))
    assert "before it" not in failed


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("log1p", "zero", "an argument is -1"),
        ("atanh", "zero", "an argument is 1 or -1"),
        ("logit", "zero", "an argument is 0 or 1"),
        ("log1p", "negative", "an argument is below -1"),
        ("acos", "negative", "an argument is beyond 1 or -1"),
        ("sqrt_", "negative", "an argument is below 0"),
    ],
)
def test_the_bad_argument_of_an_operation_is_described(name: str, kind: Any, words: str) -> None:
    assert words in str(report("loss", Operation(name, kind=kind, count=1), "not finite"))


def test_a_step_that_was_taken() -> None:
    record = StepRecord(3, 0, 1.0, 1.0, skipped=False, reason="none", precision="bf16")
    text = str(report("loss", record=record, precision="bf16-mixed"))
    assert text.startswith(
        "step 3 was taken although its loss is not finite, since its gradients are: epoch 0, batch 3, loss scale 1\n"
    )
    assert "was skipped" not in text
    again = str(report("not reproduced", record=record))
    assert again.endswith("try: look at non-deterministic operations, and at earlier batches of the window")


def test_a_repeated_cause_refers_to_the_report_that_has_the_advice() -> None:
    """Nothing was tried again, so there is no advice."""
    text = str(report("backward", is_repeated=True))
    assert "try:" not in text
    assert text.endswith("an earlier report of this cause has the advice")
    assert "earlier report" not in str(report("not reproduced", is_repeated=True))


def test_in_one_line() -> None:
    one = report("forward", EXP, remedies=(Remedy("bf16", (), True),))
    line = 'losses.py:75 "log_z = torch.exp(sim).sum(-1)"'
    assert one.in_one_line == (
        "the forward: the result of `exp` in `head` (Contrast), float16 [4, 4], is not finite; in fp32 it is finite, up"
        f" to 199,000; the largest finite input is 12.2; in {line}. Try: 'bf16', which has the range of fp32 (tried:"
        " works); or subtract the maximum before the exponential (`torch.logsumexp`, `log_softmax`). Lowering the loss"
        " scale cannot help"
    )


# -- advice ------------------------------------------------------------------------------------------------------------


def advice(*args: Any, **kwargs: Any) -> str:
    return report(*args, **kwargs).in_one_line.partition(". Try: ")[2]


def test_remedies_that_failed_are_not_advised() -> None:
    remedies = (Remedy("bf16", (), False), Remedy("fp32_modules", ("head",), False), Remedy("operation in fp32"))
    text = advice("forward", EXP, remedies=remedies)
    assert "'bf16'" not in text
    assert "fp32_modules" not in text
    assert ".float()" not in text


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (Operation("div", kind="zero"), "an epsilon in the divisor (1e-6, tried: works)"),
        (Operation("log", kind="zero"), "an epsilon in the argument of `log` (1e-6, tried: works)"),
        (Operation("sqrt", kind="negative"), "from below 0: `.clamp(min=eps)` (1e-6, tried: works)"),
        (Operation("sqrt", kind="zero", in_backward=True), "`torch.where` behind it does not help"),
        (Operation("softmax", kind="masked"), "leave at least one entry of each row unmasked"),
        (Operation("std", kind="one"), "`correction=0`"),
        (Operation("mean", kind="empty"), "leave out empty tensors"),
        (Operation("cross_entropy", kind="ignored"), "leave out batches without a label"),
        (Operation("exp", largest_input=120.0, followed_by="sum"), "subtract the maximum"),
        (Operation("linear", largest_input=1e25), "find out where 1e+25 comes from"),
    ],
)
def test_advice_if_fp32_is_not_finite_either(operation: Operation, words: str) -> None:
    text = advice("loss", operation, "not finite", remedies=(Remedy("epsilon", (1e-6,), True),))
    assert words in text
    assert text.endswith("no precision can help")
    assert "'bf16'" not in text


def test_advice_for_weights_that_have_grown() -> None:
    text = advice("forward", EXP, "not finite", largest_weights=(0.4, 3e15))
    assert text.startswith(
        "a lower learning rate, or gradient clipping: the largest weight has grown from 0.4 to 3e+15"
    )
    assert "learning rate" not in advice("forward", EXP, "not finite", largest_weights=(0.4, 30.0))


def test_advice_for_a_gradient_that_fits_at_no_scale() -> None:
    tried = [Remedy("scale", (2.0**k,), False) for k in (15, 13, 9, 3)]
    text = advice("backward", remedies=(*tried, Remedy("bf16", (), True)), largest_gradient=3.0)
    assert text.startswith("'bf16'")
    assert "no loss scale helps (tried: 2**15, 2**13, 512, 8)" in text
    assert "nothing, if" not in text


def test_an_epsilon_that_failed_is_not_advised() -> None:
    failed = tuple(Remedy("epsilon", (eps,), False) for eps in (1e-8, 1e-3))
    text = advice("loss", Operation("div", kind="zero"), "not finite", remedies=failed)
    assert text == "look at that line: an epsilon there does not help (tried: 1e-8 to 0.001); no precision can help"


@pytest.mark.parametrize(
    ("scale_is", "words"),
    [
        ("dynamic", "the scaler goes there by itself"),
        ("static", "or a dynamic one"),
        ("lowest", "`min_scale`, which should be lower"),
    ],
)
def test_a_lower_scale(scale_is: Any, words: str) -> None:
    assert words in advice(
        "backward", remedies=(Remedy("scale", (8.0,), True),), scale_is=scale_is, largest_gradient=3.0
    )


def test_a_gradient_beyond_fp16_is_not_said_to_fit() -> None:
    text = advice("backward", remedies=(Remedy("bf16", (), True),), largest_gradient=115_000.0)
    assert "which fits" not in text


def test_without_a_run_in_fp32_only_working_remedies_are_advised() -> None:
    zero = Operation("div", kind="zero")
    assert advice("loss", zero, "", remedies=(Remedy("epsilon", (1e-6,), True),)).startswith(
        "an epsilon in the divisor"
    )


def test_a_clamp_that_failed_is_not_advised() -> None:
    exp = Operation("exp", file="vae.py", dtype="float16")
    failed = tuple(Remedy("clamp", (largest,), False) for largest in (80.0, 5.0))
    assert "clamp" in advice("loss", exp)
    assert "clamp" not in advice("loss", exp, remedies=(Remedy("bf16", (), True), *failed))
    assert advice("loss", exp, "not finite", remedies=failed).startswith("look at the inputs of that line")


def test_a_remedy_tried_on_several_lines_names_them() -> None:
    log = Operation("log", kind="zero", dtype="float32")
    text = advice("loss", log, "not finite", remedies=(Remedy("logsigmoid", ("-x", "gan.py:55"), True),))
    assert text == (
        "`F.logsigmoid(-x)` in the place of `log(1 - sigmoid(x))` (tried: works), and the same in gan.py:55;"
        " no precision can help"
    )
    text = advice("loss", log, "not finite", remedies=(Remedy("epsilon", (1e-8, "gan.py:55"), True),))
    assert text.startswith("an epsilon in the argument of `log` (1e-8, tried: works), and the same in gan.py:55;")


def test_the_line_to_change_may_be_before_the_operation_that_rounds() -> None:
    values = ("mul", 'net.py:3 "z * mask"', "add", 'net.py:4 "z.sum() + 1e-8"')
    text = advice("forward", Operation("div", kind="zero"), remedies=(Remedy("source in fp32", values, True),))
    assert text.startswith('`.float()` on the inputs of `mul` in net.py:3 "z * mask" (tried: works). Lowering')


def test_advice_for_a_sum() -> None:
    total = Operation("sum", kind="sum", count=32, dtype="float16")
    text = advice("loss", total, remedies=(Remedy("operation in fp32", (), True),))
    assert text.startswith("`.float()` before that sum (tried: works)")


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
    assert "there by itself" not in str(report)
    advised = float(eval(str(report).partition("a loss scale of ")[2].partition(" or below")[0]))  # such as 2**13
    assert advised == report.working_scale
    for factor, skipped in ((1, 0), (4, 1)):
        plugin = AmpPrecision("fp16", scaler=advised * factor)
        fit(Toy, plugin, batches(1))
        assert plugin.num_skipped == skipped


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


def test_bf16_is_not_advised_in_bf16() -> None:
    class Explodes(Toy):
        def __init__(self) -> None:
            super().__init__(net=nn.Linear(8, 1))
            nn.init.ones_(self.net.weight)

        def loss(self, batch: Tensor) -> Tensor:
            return self.net(batch).float().sum()  # with finite gradients, as of a mean, the step is taken

    data = torch.utils.data.DataLoader(torch.full((4, 8), 3e38), batch_size=4)
    locator = OverflowLocator()
    fit(Explodes, AmpPrecision("bf16"), data, callbacks=[locator])
    (report,) = locator.reports
    assert (report.cause, report.diagnosis.dtype) == ("forward", "bfloat16")
    assert "'fp32' holds no larger numbers than bfloat16" in str(report)
    assert "'bf16'" not in str(report)


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
    assert "`fp32_modules=['other']` (tried: works)" in str(report)
    assert "'bf16'" not in str(report)
    advised = AmpPrecision("bf16", fp32_modules=["other"])
    fit(Close, advised, data)
    assert (advised.num_steps, advised.num_skipped) == (1, 0)


class RootOfZero(Toy):
    """The derivative of a root at 0 is infinite, and NaN after multiplication with 0, in every precision."""

    def loss(self, batch: Tensor) -> Tensor:
        out = self.net(batch).float()
        return out.square().mean() + (out - out.detach()).square().sum().sqrt()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_precision_is_advised_for_a_fault_that_fp32_has_too(precision: str) -> None:
    locator = OverflowLocator()
    fit(RootOfZero, AmpPrecision(precision), batches(1), callbacks=[locator])
    (report,) = locator.reports
    assert report.cause == "backward"
    assert "no precision can help" in str(report)
    assert "'bf16'" not in str(report)
    assert ("the scaled backward alone" in str(report)) == (precision == "fp16")
