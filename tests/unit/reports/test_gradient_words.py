"""The sentences of `GradientMonitor`."""

from __future__ import annotations

import math
from typing import Any

from support.tables import gradient_row

from lightning_amp.findings import GradientFault, TriedRemedy
from lightning_amp.reports import describe_fault

NAN: dict[str, Any] = {"sqnr_db": math.nan, "cosine": math.nan}


def words(kind: Any, *tried: TriedRemedy, whole: bool = True, faded: float = 1.0, clipped: str = "", **row: Any) -> str:
    row = {"precision": "fp16", "norm_ratio": 1.0, "sqnr_db": 2.0, "cosine": 0.5, **row}
    fault = GradientFault(kind, gradient_row(0, "a", **row), gradient_row(0, "(all)", **row), whole, clipped)
    return describe_fault(fault, tried, faded=faded)


def test_a_fault_and_what_helps() -> None:
    failed, works = TriedRemedy("`fp32_modules=['x']`", 3.0, False), TriedRemedy("`fp32_modules=['a']`", 40.0, True)
    text = words("rounding", failed, works, precision="bf16")
    assert "first in `a` (SQNR 2.0 dB, cosine 0.5000)" in text
    assert text.endswith("Try: `fp32_modules=['a']` (tried: 40.0 dB).")
    text = words("rounding", failed, precision="bf16", faded=0.001)
    assert "Tried, each without success: `fp32_modules=['x']`. `compare_precisions` tells" in text
    assert "late in a training that is usual" in text
    assert words("rounding", precision="bf16", whole=False).startswith("The gradient of `a` differs from fp32")


def test_each_kind() -> None:
    assert "25 % of its values become zero at a loss scale of 1" in words("zero", underflow_fraction=0.25)
    assert words("overflow", **NAN).startswith("The gradient overflows in fp16 at a loss scale of 1, first in `a`;")
    assert words("nan", **NAN, largest=math.nan) == (
        "The gradient is NaN in fp32, too, first in `a`: no precision and no loss scale helps."
    )
    text = words("length", norm_ratio=2.0**-10, cosine=1.0, scale=2.0**10)
    assert "which is 1 / loss scale: both `training_step`" in text
    text = words("length", norm_ratio=2.0**-10, cosine=1.0, scale=2.0**4)
    assert "call `lightning_amp.precision.unscale_(self.trainer, optimizer)` before it" in text
    assert words("length", clipped="`clip_grad_norm_`", norm_ratio=0.1, scale=64.0) == (
        "The gradient has 0.1 times the length that it has in fp32: `clip_grad_norm_` clips it while it is multiplied"
        " with the loss scale, 64. Call `lightning_amp.precision.unscale_(self.trainer, optimizer)` before it (not"
        " tried)."
    )
