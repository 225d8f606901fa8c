"""The precision and the scaler that follow from the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.casting import Choice
from lightning_amp.precision._settings import Settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", torch.bfloat16])
@pytest.mark.parametrize("scaler", [DynamicLossScaler(), torch.amp.GradScaler("cpu"), 128.0])
def test_a_scaler_where_none_is_used(precision: Any, scaler: Any) -> None:
    with pytest.raises(ValueError, match=r"does not use a loss scaler.*leave `scaler` out"):
        AmpPrecision(precision, scaler=scaler)


@pytest.mark.parametrize("scaler", ["dynamic", -1.0, float("nan"), 0.0, object()])
def test_not_a_scaler(scaler: Any) -> None:
    with pytest.raises(ValueError, match=r"scale"):
        AmpPrecision("fp16", scaler=scaler)


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_where_none_is_needed_a_scaler_is_left_unused(precision: str) -> None:
    settings = Settings(precision, None, 128.0)
    assert settings.scaler(Choice.of("fp32")) is None
    assert settings.scaler(Choice.of("bf16")) is None
    assert settings.scaler(Choice.of("fp16")) is settings.given_scaler is not None


@pytest.mark.parametrize("scale", [128.0, 128])
def test_a_number_is_a_scale_that_never_moves(scale: float) -> None:
    _, scaler = Settings("fp16", None, scale).first()
    assert isinstance(scaler, DynamicLossScaler)
    for found_inf in (torch.ones(()), *[torch.zeros(())] * 3):
        scaler.advance(found_inf)
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize(
    ("precision", "eval_precision", "training", "evaluation"),
    [
        ("fp16", "32-true", "fp16", "fp32"),
        ("fp16", None, "fp16", "fp16"),
        ("auto", None, "picked", "picked"),
        ("auto", "auto", "picked", "picked"),
        ("auto", "fp16", "picked", "fp16"),
        ("fp16", "auto", "fp16", "picked"),
        ("fp8", None, "fp8", "bf16"),
        ("fp8", "fp32", "fp8", "fp32"),
    ],
)
def test_a_device_settles_both_precisions(
    precision: str, eval_precision: str | None, training: str, evaluation: str
) -> None:
    picked, reason = Choice.pick(CPU)
    settings = Settings(precision, eval_precision, None)
    *choices, why = settings.choose(CPU, fitting=False)
    assert [choice.name for choice in choices] == [picked.name if n == "picked" else n for n in (training, evaluation)]
    assert why == (reason if precision == "auto" else "")
