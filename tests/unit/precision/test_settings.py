"""The precision and the scaler that follow from the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_amp import AmpPrecision, DynamicLossScaler


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", torch.bfloat16])
@pytest.mark.parametrize("scaler", [DynamicLossScaler(), torch.amp.GradScaler("cpu"), 128.0])
def test_a_scaler_where_none_is_used(precision: Any, scaler: Any) -> None:
    with pytest.raises(ValueError, match=r"does not use a loss scaler.*leave `scaler` out"):
        AmpPrecision(precision, scaler=scaler)


@pytest.mark.parametrize("scaler", ["dynamic", -1.0, float("nan"), 0.0, object()])
def test_not_a_scaler(scaler: Any) -> None:
    with pytest.raises(ValueError, match=r"scale"):
        AmpPrecision("fp16", scaler=scaler)
