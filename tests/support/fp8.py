"""fp8 on any device: recipes that emulate it, and a model whose first and last layers do not qualify."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

RECIPES = ("rowwise_with_gw_hp", "rowwise", "tensorwise")

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None or not hasattr(torch.nn.functional, "ScalingType"),
    reason="needs torchao 0.18, which needs a newer torch",
)


def float8() -> Any:
    """Import `torchao.float8` without the warnings of its first compilation by Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8
    return torchao.float8


def emulated(recipe: str = RECIPES[0], **changes: Any) -> Any:
    return replace(float8().Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)


def sqnr_db(value: Tensor, reference: Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    return float(20 * torch.log10(reference.norm() / (value - reference).norm()))


class Deep(nn.Sequential):
    """Four layers that qualify for fp8, between a first and a last layer that do not."""

    def __init__(self, features: int = 8, width: int = 32) -> None:
        inner = [m for _ in range(4) for m in (nn.Linear(width, width), nn.Tanh())]
        super().__init__(nn.Linear(features, width), nn.Tanh(), *inner, nn.Linear(width, 1))
