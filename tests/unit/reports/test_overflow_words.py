"""What is said of a skipped step: the words follow from what was found and tried."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_amp.reports import OverflowReport, Remedy
from lightning_amp.scaling import StepRecord
from lightning_amp.tracing import Diagnosis, Operation

EXP = Operation(
    "exp", "/home/me/losses.py", 75, "log_z = torch.exp(sim).sum(-1)", "head", "Contrast", dtype="float16",
    shape=(4, 4), largest_input=12.2, largest_in_fp32=199_000.0,
)  # fmt: skip


def report(cause: Any, operation: Operation | None = None, in_fp32: Any = "finite", **changes: Any) -> OverflowReport:
    found = Diagnosis(
        cause, module="head", module_class="Contrast", where="output", dtype="float16", shape=(4, 4),
        in_fp32=in_fp32, operation=operation,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "record": StepRecord(0, 0, 2.0**16, 2.0**16, skipped=True, reason="loss", precision="fp16"),
        "rank": 0, "world_size": 1, "epoch": 0, "batch_idx": 3, "window": (3, 3), "num_replayed": 1,
        "cause": cause, "diagnosis": found, "parameters": (), "precision": "16-mixed",
    }  # fmt: skip
    return OverflowReport(**{**arguments, **changes})


def advice(*args: Any, **kwargs: Any) -> str:
    return str(report(*args, **kwargs)).partition("\n  try: ")[2]


def test_a_whole_report() -> None:
    remedies = (Remedy("bf16", (), True), Remedy("fp32_modules", ("head",), False))
    assert str(report("forward", EXP, remedies=remedies, parameters=("head.weight",))) == (
        "step 0 was skipped: epoch 0, batch 3, loss scale 2**16\n"
        "  cause: the forward: the result of `exp` in `head` (Contrast), float16 [4, 4], is not finite; in fp32 it is,"
        " up to 199,000; the largest finite input is 12.2\n"
        '  line: losses.py:75 "log_z = torch.exp(sim).sum(-1)"\n'
        "  non-finite gradients: `head.weight`\n"
        "  try: 'bf16', whose range is that of fp32 (tried: works); or subtract the maximum before the exponential"
        " (`torch.logsumexp`, `log_softmax`). Lowering the loss scale cannot help"
    )


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
        (Operation("exp", largest_input=120.0), "subtract the maximum"),
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
