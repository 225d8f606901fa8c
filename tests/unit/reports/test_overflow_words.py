"""What is said of a skipped step."""

from __future__ import annotations

from typing import Any

import pytest
from support.skips import EXP, report

from lightning_amp.findings import StepRecord
from lightning_amp.reports import Remedy
from lightning_amp.tracing import Operation


def test_a_whole_report() -> None:
    remedies = (Remedy("bf16", (), True), Remedy("fp32_modules", ("head",), False))
    assert str(report("forward", EXP, remedies=remedies, parameters=("head.weight",))) == (
        "step 0 was skipped: epoch 0, batch 3, loss scale 2**16\n"
        "  cause: the forward: the result of `exp` in `head` (Contrast), float16 [4, 4], is not finite; in fp32 it is"
        " finite, up to 199,000; the largest finite input is 12.2\n"
        '  line: losses.py:75 "log_z = torch.exp(sim).sum(-1)"\n'
        "  non-finite gradients: `head.weight`\n"
        "  try: 'bf16', whose range is that of fp32 (tried: works); or subtract the maximum before the exponential"
        " (`torch.logsumexp`, `log_softmax`). Lowering the loss scale cannot help"
    )


def test_what_stands_out_is_said_beside_what_fp32_makes_of_it() -> None:
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


def test_the_operation_that_lost_the_digits_is_named() -> None:
    log = Operation("log", "gan.py", 10, "torch.log(1 - p)", dtype="float16", shape=(4,), kind="zero", count=1)
    values = ("sigmoid", 'gan.py:9 "p = torch.sigmoid(x)"')
    text = str(report("loss", log, remedies=(Remedy("source in fp32", values * 2, True),)))
    assert (
        '\n  line: gan.py:10 "torch.log(1 - p)"\n'
        '  before it: the result of `sigmoid` in gan.py:9 "p = torch.sigmoid(x)"'
        " is rounded to half precision, so that the argument of `log` is 0\n" in text
    )
    assert "try: `.float()` on what goes into `sigmoid` (tried: works). Lowering" in text
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
def test_where_an_operation_ends(name: str, kind: Any, words: str) -> None:
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


def test_in_one_line() -> None:
    one = report("forward", EXP, remedies=(Remedy("bf16", (), True),))
    line = 'losses.py:75 "log_z = torch.exp(sim).sum(-1)"'
    assert one.in_one_line == (
        "the forward: the result of `exp` in `head` (Contrast), float16 [4, 4], is not finite; in fp32 it is finite, up"
        f" to 199,000; the largest finite input is 12.2; in {line}. Try: 'bf16', whose range is that of fp32 (tried:"
        " works); or subtract the maximum before the exponential (`torch.logsumexp`, `log_softmax`). Lowering the loss"
        " scale cannot help"
    )
