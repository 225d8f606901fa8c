"""The scale of derivatives inside the loss is independent of the loss scale, and adapts by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import CountReads
from torch import Tensor

from lightning_amp.scaling import DerivativeScale, DynamicLossScaler, Saved

INF, NAN = float("inf"), float("nan")


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


def test_what_would_be_zero_in_half_precision_is_not() -> None:
    assert derivative(DerivativeScale(), 1e-8, scaler=None).tolist() == [0.0] * 3
    assert derivative(DerivativeScale(), 1e-8).tolist() == pytest.approx([1e-8] * 3, rel=0.02)


def test_they_come_back_in_float32_and_without_a_scaler_as_they_are() -> None:
    assert derivative(DerivativeScale(), 0.5).dtype == torch.float32
    assert derivative(DerivativeScale(), 0.5, scaler=None).dtype == torch.float16
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    unused = torch.ones(1, requires_grad=True)
    of_x, of_unused = DerivativeScale().grad(scaler(), [x.sum(), x.sum()], [x, unused], allow_unused=True)
    assert (of_x.dtype, of_x.tolist(), of_unused) == (torch.float64, [2.0, 2.0], None)


def test_an_overflow_costs_a_quarter_and_two_thousand_calls_of_growth() -> None:
    scale = DerivativeScale()
    assert derivative(scale, 100.0).isinf().all()
    assert scale.state() == [2.0**8, 2000.0]
    assert derivative(scale, 100.0).tolist() == [100.0] * 3
    derivative(scale, 1e-6)  # small, but too soon after the overflow
    assert scale.state() == [2.0**8, 1998.0]


def test_an_infinite_output_says_nothing_about_the_scale() -> None:
    scale = DerivativeScale()
    x = torch.ones(1, requires_grad=True)
    scale.grad(scaler(), x * INF, x)
    assert now(scale) == 2.0**10


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


def test_the_backward_through_a_derivative_carries_the_loss_scale() -> None:
    """The gradient of a penalty equals the fp32 gradient times the loss scale."""
    weight = torch.tensor([0.5, -2.0], requires_grad=True)

    def penalty(grad: Any) -> Tensor:
        x = torch.tensor([1.0, 3.0], requires_grad=True)
        (gradient,) = grad((weight * x**2).sum(), x)
        return (gradient.norm() - 1) ** 2

    (true,) = torch.autograd.grad(penalty(lambda y, x: torch.autograd.grad(y, x, create_graph=True)), weight)
    ours = penalty(lambda y, x: DerivativeScale().grad(scaler(), y, x, create_graph=True))
    torch.testing.assert_close(torch.autograd.grad(ours * 1024.0, weight)[0], true * 1024.0)


@pytest.mark.parametrize(
    "bad",
    [None, "x", [1024.0], [1024.0, 0.0, 0.0], [0.0, 0.0], [NAN, 0.0], [INF, 0.0], [1.0, -1.0], [1.0, True], (1, 2)],
)
def test_a_wrong_state_is_refused_and_changes_nothing(bad: Any) -> None:
    scale = DerivativeScale()
    with pytest.raises(ValueError, match=r"`plugin.scale` must be a scale above 0 and up to 32768, and a number of"):
        scale.load(Saved({"scale": bad}, "plugin"), "scale")
    assert scale.state() is None
