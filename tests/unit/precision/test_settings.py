"""The precision and the scaler that follow from the arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.casting import Choice
from lightning_amp.precision._settings import Settings

CPU = torch.device("cpu")


def scaler_of(settings: Settings, precision: str) -> torch.amp.GradScaler | None:
    return settings.next_scaler(Choice.of(precision), None, "cpu")


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
    assert scaler_of(settings, "fp32") is None
    assert scaler_of(settings, "bf16") is None
    assert scaler_of(settings, "fp16") is settings.given_scaler is not None


@pytest.mark.parametrize("scale", [128.0, 128])
def test_a_number_is_a_scale_that_never_moves(scale: float) -> None:
    _, scaler = Settings("fp16", None, scale).first()
    assert isinstance(scaler, DynamicLossScaler)
    for found_inf in (torch.ones(()), *[torch.zeros(())] * 3):
        scaler.advance(found_inf)
    assert scaler.get_scale() == 128.0


def test_its_own_scaler_is_made_once() -> None:
    """A second Trainer resets the same scaler, because users may hold it."""
    settings = Settings("fp16", None, None)
    assert scaler_of(settings, "fp16") is scaler_of(settings, "fp16")
    assert settings.given_scaler is None
    assert scaler_of(settings, "bf16") is None


@pytest.mark.parametrize("kind", [DynamicLossScaler, partial(torch.amp.GradScaler, "cpu")])
def test_reset_brings_any_scaler_back_to_its_first_scale(kind: Any) -> None:
    scaler = kind(init_scale=64.0)
    settings = Settings("fp16", None, scaler)
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0
    settings.reset(scaler)
    assert scaler.get_scale() == 64.0
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_reset_has_nothing_to_do_without_a_scale() -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    Settings("fp16", None, off).reset(off)
    Settings("bf16", None, None).reset(None)
    assert off.state_dict() == {}


@pytest.mark.parametrize("picked", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("precision", "eval_precision", "training", "evaluation", "asked"),
    [
        ("fp16", "32-true", "fp16", "fp32", False),
        ("fp16", None, "fp16", "fp16", False),
        ("auto", None, "picked", "picked", True),
        ("auto", "auto", "picked", "picked", True),
        ("auto", "fp16", "picked", "fp16", True),
        ("fp16", "auto", "fp16", "picked", True),
    ],
)
def test_a_device_settles_both_precisions(
    picked: str, precision: str, eval_precision: str | None, training: str, evaluation: str, asked: bool
) -> None:
    calls: list[str] = []

    def pick() -> tuple[Choice, str]:
        calls.append(picked)
        return Choice.of(picked), "the machine likes it"

    settings = Settings(precision, eval_precision, None)
    choice, why = settings.choose(CPU, pick)
    expected = [picked if name == "picked" else name for name in (training, evaluation)]
    assert [choice.name, settings.evaluation(choice, CPU).name] == expected
    assert why == ("the machine likes it" if precision == "auto" else "")
    assert len(calls) == asked  # a precision that was asked for is not measured


def test_evaluation_follows_auto_where_the_run_falls_back_and_not_a_name() -> None:
    fell_back = Choice.of("fp32")
    for precision, evaluation, expected in (
        ("auto", "auto", "fp32"),
        ("fp16", "auto", "bf16"),
        ("fp16", "fp16", "fp16"),
    ):
        settings = Settings(precision, evaluation, None)
        settings.choose(CPU, lambda: (Choice.of("bf16"), ""))
        assert settings.evaluation(fell_back, CPU).name == expected


def test_fp8_is_bf16_but_for_products_in_training() -> None:
    fp8 = Choice.of("fp8")
    assert Settings("fp8", None, None).evaluation(fp8, CPU) == Choice.of("bf16")
    assert Settings("fp8", "fp32", None).evaluation(fp8, CPU) == Choice.of("fp32")
