"""Compare the counted losses of a cast to 8 bits with torchao's cast itself."""

from __future__ import annotations

import pytest
import torch
from support.fp8 import float8, needs_torchao
from torch import Tensor

from lightning_amp.numerics import ScaledCast


def cast_by_torchao(values: Tensor, cast: ScaledCast) -> Tensor:
    """Return the values that torchao's products use."""
    ScalingGranularity = float8().ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    return hp_tensor_to_float8_dynamic(
        values,
        {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[cast.number_format],
        None,
        scaling_granularity=ScalingGranularity.AXISWISE if cast.rowwise else ScalingGranularity.TENSORWISE,
        axiswise_dim=-1 if cast.rowwise else None,
        round_scales_to_power_of_2=cast.power_of_two,
    ).to_original_precision()


@needs_torchao
@pytest.mark.parametrize("number_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-10, 1e-15, 1e20])
def test_counts_what_torchao_makes_zero(number_format: str, rowwise: bool, power_of_two: bool, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = size * torch.randn(64, 128, generator=generator) * torch.exp(4 * torch.randn(64, 128, generator=generator))
    values[5] = 0
    values[6, 7] = size * 1e7
    cast = ScaledCast(number_format, rowwise, power_of_two)
    to_zero, saturated, counted = cast.losses(values).tolist()
    assert to_zero == ((cast_by_torchao(values, cast) == 0) & (values != 0)).sum()
    assert 0 < to_zero < counted == (values != 0).sum()
    assert saturated == 0


def test_what_is_not_finite_is_saturated() -> None:
    cast = ScaledCast("e4m3", rowwise=True, power_of_two=True)
    values = torch.tensor([[1.0, 2.0], [torch.inf, 1.0], [torch.nan, 1.0]])
    assert cast.losses(values)[1] >= 2
    assert cast.losses(torch.zeros(0, 4)).tolist() == [0, 0, 0]
    assert cast.losses(torch.tensor(3.0)).tolist() == [0, 0, 1]
    assert cast.losses(torch.zeros(2, 2)).tolist() == [0, 0, 0]
