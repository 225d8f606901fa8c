"""Our fp8 product supports second derivatives. A test fails when torchao's own does, since ours can go then."""

from __future__ import annotations

import pytest
import torch
from support.fp8 import RECIPES, emulated, needs_torchao
from torch import nn

from lightning_amp._compat._torchao import float8_linear, float8_twin

pytestmark = needs_torchao


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_is_what_torchao_computes(recipe: str, bias: bool) -> None:
    layer = nn.Linear(32, 48, bias=bias)
    twin = float8_twin(layer, emulated(recipe))
    assert twin.weight is layer.weight
    assert twin.bias is layer.bias
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    inputs = [x, *layer.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = float8_linear(twin, x), twin(x)
    assert torch.equal(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.float().sum(), inputs) for y in (ours, theirs)), strict=True):
        assert torch.equal(a, b)


def test_the_twin_finds_parameters_where_the_layer_does() -> None:
    layer = nn.Linear(32, 48)
    twin = float8_twin(layer, emulated())
    layer.weight = nn.Parameter(torch.zeros(48, 32))
    assert twin.weight is layer.weight


def test_torchao_cannot_differentiate_twice() -> None:
    layer = nn.Linear(32, 32)
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    twin = float8_twin(layer, emulated())
    with torch.autocast("cpu", torch.bfloat16):
        output = twin(twin(x))
    with pytest.raises(AssertionError, match="Float8TrainingTensor"):
        (gradient,) = torch.autograd.grad(output.float().tanh().sum(), x, create_graph=True)
        torch.autograd.grad(gradient.float().square().sum(), layer.weight)
