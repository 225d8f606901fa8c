"""fp8 on any device: recipes that emulate it, and a model with layers of every kind."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not hasattr(torch.nn.functional, "ScalingType"):  # an import that fails once may half succeed the next time
    pytest.skip("torchao 0.18 needs a newer torch", allow_module_level=True)

with warnings.catch_warnings():  # its own, when Python compiles it for the first time
    warnings.simplefilter("ignore")
    from torchao.float8 import Float8LinearConfig

RECIPES = ("rowwise_with_gw_hp", "rowwise", "tensorwise")


def emulated(recipe: str = RECIPES[0], **changes: Any) -> Any:
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)


def sqnr_db(value: Tensor, reference: Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    return float(20 * torch.log10(reference.norm() / (value - reference).norm()))


class Deep(nn.Sequential):
    """Four layers that qualify between two that do not, by their place."""

    def __init__(self, features: int = 8, width: int = 32) -> None:
        inner = [m for _ in range(4) for m in (nn.Linear(width, width), nn.Tanh())]
        super().__init__(nn.Linear(features, width), nn.Tanh(), *inner, nn.Linear(width, 1))
