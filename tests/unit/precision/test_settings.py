"""Which precision and which scaler follow from what was passed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_amp import AmpPrecision, DynamicLossScaler
from lightning_amp.precision._settings import Settings


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
    assert settings.scaler("fp32") is None
    assert settings.scaler("bf16") is None
    assert settings.scaler("fp16") is settings.given_scaler is not None


@pytest.mark.parametrize("scale", [128.0, 128])
def test_a_number_is_a_scale_that_never_moves(scale: float) -> None:
    scaler = Settings("fp16", None, scale).scaler("fp16")
    assert isinstance(scaler, DynamicLossScaler)
    for found_inf in (torch.ones(()), *[torch.zeros(())] * 3):
        scaler.advance(found_inf)
    assert scaler.get_scale() == 128.0


def test_its_own_scaler_is_made_once() -> None:
    """A second Trainer resets it; it is not another one, whose records and settings somebody holds."""
    settings = Settings("fp16", None, None)
    assert settings.scaler("fp16") is settings.scaler("fp16")
    assert settings.given_scaler is None
    assert settings.scaler("bf16") is None


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


def test_a_device_settles_both_precisions() -> None:
    cpu = torch.device("cpu")
    training, evaluation, why = Settings("fp16", "32-true", None).choose(cpu)
    assert (training.name, evaluation.name, why) == ("fp16", "fp32", "")
    training, evaluation, why = Settings("auto", None, None).choose(cpu)
    assert evaluation == training
    assert "CPU" in why  # which "auto" alone has to explain
