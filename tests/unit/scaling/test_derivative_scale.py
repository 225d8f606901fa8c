"""The scale of derivatives inside the loss is independent of the loss scale, and adapts by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import CountReads
from torch import Tensor

from lightning_amp.scaling import DerivativeScale, DynamicLossScaler


def scaler(scale: float = 2.0**16) -> torch.amp.GradScaler:
    made = DynamicLossScaler(scale)
    made.scale(torch.ones(()))
    return made


def derivative(scale: DerivativeScale, factor: float, **kwargs: Any) -> Tensor:
    """Return the derivative of half-precision outputs. Its true value is `factor`."""
    x = torch.ones(3, requires_grad=True)
    y = x.half()
    (gradient,) = scale.grad(kwargs.pop("scaler", scaler()), y.float().sum() * factor, y, **kwargs)
    assert gradient is not None
    return gradient


def now(scale: DerivativeScale) -> float:
    state = scale.state()
    assert state is not None
    return state[0]


@pytest.mark.parametrize(("loss_scale", "limit"), [(2.0**12, 2.0**12), (2.0**20, 2.0**15), (2.0**4, 2.0**10)])
def test_it_grows_while_derivatives_are_small_up_to_the_loss_scale(loss_scale: float, limit: float) -> None:
    scale = DerivativeScale()
    for _ in range(8):
        derivative(scale, 1e-7, scaler=scaler(loss_scale))
    assert now(scale) == limit
    derivative(scale, 2.0**-4 / limit, scaler=scaler(2.0**24))  # just large enough
    assert now(scale) == limit


def test_nothing_waits_for_the_device() -> None:
    scale, loss_scaler = DerivativeScale(), scaler()
    with CountReads() as reads:
        for factor in (100.0, 1e-7, 1.0):
            derivative(scale, factor, scaler=loss_scaler)
    assert reads.count == 0
