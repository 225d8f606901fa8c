"""What the rows of a sample say: one fault per kind, and none where there is none."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.tables import gradient_row

from lightning_amp.reports import Trial, describe_loss, find_gradient_loss
from lightning_amp.reports._gradient_table import GradientRow

NAN: dict[str, Any] = {"sqnr_db": math.nan, "cosine": math.nan}


def rows(*changed: dict[str, Any], total: dict[str, Any], **common: Any) -> list[GradientRow]:
    """Rows `a`, `b`, ... in the order of the forward, and that of all."""
    common = {"precision": "fp16", "length": 1.0, **common}
    named = zip("abcdef", changed, strict=False)
    return [*(gradient_row(0, n, **{**common, **c}) for n, c in named), gradient_row(0, "(all)", **{**common, **total})]


def found(*args: Any, clipped: str = "", **kwargs: Any) -> tuple[str, str] | None:
    loss = find_gradient_loss(rows(*args, **kwargs), ["c", "b", "a"], clipped)
    return None if loss is None else loss.cause[:2]


@pytest.mark.parametrize(
    ("changed", "total", "cause"),
    [
        (({}, {}, {}), {}, None),
        (({"sqnr_db": -60.0}, {}, {}), {}, None),  # zero but for rounding: a bias before a normalisation
        (({"sqnr_db": 8.0}, {}, {}), {}, None),
        (({}, {"largest": 0.0, "sqnr_db": math.inf}, {}), {}, None),
        (({"sqnr_db": 1.0}, {"sqnr_db": 2.0}, {}), {"sqnr_db": 3.0, "cosine": 0.5}, ("rounding", "b")),
        (({"sqnr_db": 1.0}, {}, {}), {"sqnr_db": 30.0}, ("rounding", "a")),
        (({"sqnr_db": 0.0, "underflow_fraction": 1.0, "length": 0.0}, {}, {}), {}, ("zero", "a")),
        ((NAN, NAN, {}), NAN, ("overflow", "b")),
        (({**NAN, "largest": math.nan}, {}, {}), {**NAN, "largest": math.nan}, ("nan", "a")),
        (({**NAN, "largest": math.inf}, {}, {}), {**NAN, "largest": math.inf}, ("infinite", "a")),
        (({"sqnr_db": 0.0, "length": 1e-4},) * 3, {"sqnr_db": 0.0, "length": 1e-4}, ("length", "c")),
    ],
)
def test_kinds(changed: Any, total: Any, cause: Any) -> None:
    assert found(*changed, total=total) == cause


def test_in_bf16_nothing_becomes_zero() -> None:
    lost = {"sqnr_db": 1.0, "length": 0.2, "underflow_fraction": 1.0, "cosine": 0.5}
    assert found(lost, {}, total=lost, precision="bf16") == ("rounding", "a")


def test_who_clips_counts_only_if_it_did_harm() -> None:
    assert found({}, {}, total={}, clipped="`clip_grad_norm_`") is None
    assert found(NAN, {}, total={**NAN, "length": math.nan}, clipped="`clip_grad_value_`") == ("length", "a")


def test_words() -> None:
    def words(changed: dict[str, Any], total: dict[str, Any], *trials: Trial, faded: float = 1.0, **common: Any) -> str:
        loss = find_gradient_loss(rows(changed, {}, total=total, **common), ["b", "a"])
        assert loss is not None
        return describe_loss(loss, trials, faded=faded)

    low = {"sqnr_db": 2.0, "cosine": 0.5}
    text = words(low, low, Trial("`fp32_modules=['x']`", 3.0), Trial("`fp32_modules=['a']`", 40.0), precision="bf16")
    assert "first that of `a` (SQNR 2.0 dB, cosine 0.5000)" in text
    assert text.endswith("What helps: `fp32_modules=['a']` (tried: 40.0 dB).")
    text = words(low, low, Trial("`fp32_modules=['x']`", math.nan), precision="bf16", faded=0.001)
    assert "Tried, each without success: `fp32_modules=['x']`. `compare_precisions` tells" in text
    assert "late in a training that is usual" in text
    text = words(low, {"sqnr_db": 30.0}, precision="bf16")
    assert text.startswith("The gradient of `a` is not that of fp32")
    assert "25 % of it becomes zero at a loss scale of 1" in words({**low, "underflow_fraction": 0.25}, low)
    assert words(NAN, NAN).startswith("The gradient overflows in fp16 at a loss scale of 1, first that of `a`;")
    nan = {**NAN, "largest": math.nan}
    assert words(nan, nan).endswith(
        "first (in the order of the backward) that of `a`: no precision and no loss scale helps."
    )
    short = {"sqnr_db": 0.0, "length": 2.0**-10, "cosine": 1.0}
    loss = find_gradient_loss(rows(short, total=short), [])
    assert loss is not None
    scaled = loss._replace(total=loss.total._replace(scale=2.0**10))
    assert "one by the loss scale: `training_step` divides by it" in describe_loss(scaled, [])
    other = loss._replace(total=loss.total._replace(scale=2.0**4))
    assert "unscale_(self.trainer, optimizer)` before it makes them true ones" in describe_loss(other, [])
