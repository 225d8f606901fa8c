"""What is advised follows from what was found and tried."""

from __future__ import annotations

from typing import Any

import pytest
from support.skips import EXP, report

from lightning_amp.reports import Remedy
from lightning_amp.reports._overflow_cures import cure
from lightning_amp.tracing import Operation


def advice(*args: Any, **kwargs: Any) -> str:
    return cure(report(*args, **kwargs))


def test_what_did_not_work_is_not_advised() -> None:
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
        (Operation("mean", kind="empty"), "leave out what is empty"),
        (Operation("cross_entropy", kind="ignored"), "leave out batches without a label"),
        (Operation("exp", largest_input=120.0, followed_by="sum"), "subtract the maximum"),
        (Operation("linear", largest_input=1e25), "find out where 1e+25 comes from"),
    ],
)
def test_what_fp32_cannot_either(operation: Operation, words: str) -> None:
    text = advice("loss", operation, "not finite", remedies=(Remedy("epsilon", (1e-6,), True),))
    assert words in text
    assert text.endswith("no precision can help")
    assert "'bf16'" not in text


def test_weights_that_have_grown() -> None:
    text = advice("forward", EXP, "not finite", largest_weights=(0.4, 3e15))
    assert text.startswith(
        "a lower learning rate, or gradient clipping: the largest weight has grown from 0.4 to 3e+15"
    )
    assert "learning rate" not in advice("forward", EXP, "not finite", largest_weights=(0.4, 30.0))


def test_a_gradient_that_no_scale_saves() -> None:
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


def test_what_does_not_fit_is_not_said_to() -> None:
    text = advice("backward", remedies=(Remedy("bf16", (), True),), largest_gradient=115_000.0)
    assert "which fits" not in text


def test_where_fp32_is_unknown_only_what_worked_is_advised() -> None:
    zero = Operation("div", kind="zero")
    assert advice("loss", zero, "", remedies=(Remedy("epsilon", (1e-6,), True),)).startswith(
        "an epsilon in the divisor"
    )


def test_a_clamp_that_failed_is_not_advised() -> None:
    exp = Operation("exp", file="vae.py", dtype="float16")
    failed = tuple(Remedy("clamp", (largest,), False) for largest in (80.0, 5.0))
    assert "clamp" in advice("loss", exp)
    assert "clamp" not in advice("loss", exp, remedies=(Remedy("bf16", (), True), *failed))
    assert advice("loss", exp, "not finite", remedies=failed).startswith("look at what goes into that line")


def test_what_was_tried_on_several_lines_says_which() -> None:
    log = Operation("log", kind="zero", dtype="float32")
    text = advice("loss", log, "not finite", remedies=(Remedy("logsigmoid", ("-x", "gan.py:55"), True),))
    assert text == (
        "`F.logsigmoid(-x)` in the place of `log(1 - sigmoid(x))` (tried: works), and the same in gan.py:55;"
        " no precision can help"
    )
    text = advice("loss", log, "not finite", remedies=(Remedy("epsilon", (1e-8, "gan.py:55"), True),))
    assert text.startswith("an epsilon in the argument of `log` (1e-8, tried: works), and the same in gan.py:55;")


def test_the_place_to_mend_may_be_another_than_the_one_that_lost_the_digits() -> None:
    values = ("mul", 'net.py:3 "z * mask"', "add", 'net.py:4 "z.sum() + 1e-8"')
    text = advice("forward", Operation("div", kind="zero"), remedies=(Remedy("source in fp32", values, True),))
    assert text.startswith('`.float()` on what goes into `mul` in net.py:3 "z * mask" (tried: works). Lowering')


def test_a_sum() -> None:
    total = Operation("sum", kind="sum", count=32, dtype="float16")
    text = advice("loss", total, remedies=(Remedy("operation in fp32", (), True),))
    assert text.startswith("`.float()` before that sum (tried: works)")
