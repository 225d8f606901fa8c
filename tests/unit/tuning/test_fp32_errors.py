"""Relative errors, and how they are written."""

from __future__ import annotations

import math

import pytest

from lightning_amp.tuning._fp32_errors import Errors, relative_error


@pytest.mark.parametrize(
    ("value", "reference", "error"),
    [
        (1.1, 1.0, 0.1),
        (-1.1, -1.0, 0.1),
        (0.0, 0.0, 0.0),
        (0.02, 0.0, 0.02),  # the difference itself
        (math.nan, 1.0, math.inf),
        (math.inf, 1.0, math.inf),
    ],
)
def test_relative_error(value: float, reference: float, error: float) -> None:
    assert relative_error(value, reference) == pytest.approx(error)


@pytest.mark.parametrize(
    ("errors", "fine", "text", "beyond"),
    [
        (Errors(0.01), True, "gradients differ by 1 %", ""),
        (
            Errors(0.2, {"a": 0.01, "b": 3.4}),
            False,
            "gradients differ by 20 % and `b` differs by 340 %",
            "gradients differ by 20 % and `b` differs by 340 %",
        ),
        (
            Errors(0.01, {"a": math.inf}),
            False,
            "gradients differ by 1 % and `a` is not finite",
            "`a` is not finite",
        ),
        (Errors(math.inf, {}, "the loss is not finite"), False, "the loss is not finite", "the loss is not finite"),
    ],
)
def test_errors(errors: Errors, fine: bool, text: str, beyond: str) -> None:
    assert errors.within(0.05) == fine
    assert errors.describe() == text
    assert errors.describe(0.05) == beyond
