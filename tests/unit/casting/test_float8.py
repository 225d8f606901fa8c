"""Layers multiply in fp8 in training only, and stay the user's own layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fp8 import RECIPES, emulated, needs_torchao, sqnr_db
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from lightning_amp._compat._torchao import float8_linear, float8_twin
from lightning_amp.casting import linears_in_fp8

pytestmark = needs_torchao

LAYERS = {"0", "2", "4"}


class Stage:
    in_fp8 = True


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 16))


def batch(rows: int = 24) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def step(module: Callable[..., Any], x: Tensor, autocast: bool = True, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return output and gradients of the parameters, in one row."""
    parameters = [*module.parameters()]  # pyright: ignore[reportFunctionMemberAccess]
    with torch.autocast("cpu", dtype, enabled=autocast, cache_enabled=False):
        output = module(x).float()
    gradients = torch.autograd.grad(output.square().sum(), parameters)
    return torch.cat([output.detach().flatten(), *(g.flatten() for g in gradients)])


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(params=RECIPES)
def converted(request: pytest.FixtureRequest, stage: Stage) -> Iterator[nn.Sequential]:
    module = net()
    with linears_in_fp8(module, LAYERS, emulated(request.param), "cpu", stage):
        yield module
    assert not any("forward" in vars(m) for m in module.modules())


def test_trains_in_fp8_and_nothing_else_does(converted: nn.Sequential, stage: Stage) -> None:
    x, plain = batch(), net()
    exact, half, fp8 = step(plain, x, autocast=False), step(plain, x), step(converted, x)
    assert 18 < sqnr_db(fp8, exact) < 35 < sqnr_db(half, exact)
    assert torch.equal(step(converted, x, autocast=False), exact)
    other = torch.float16
    assert torch.equal(step(converted, x, dtype=other), step(plain, x, dtype=other)), "the user asked for fp16"
    stage.in_fp8 = False
    assert torch.equal(step(converted, x), half)


def test_hooks_and_replaced_parameters_count(converted: nn.Sequential) -> None:
    seen: list[int] = []
    converted[2].register_forward_hook(lambda *_: seen.append(1))
    converted[2].weight = nn.Parameter(torch.zeros(96, 96))
    converted[2].bias = nn.Parameter(torch.ones(96))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted[2](torch.randn(3, 96)), torch.ones(3, 96, dtype=torch.bfloat16))
    assert seen == [1]


@pytest.mark.parametrize("rows", [1, 7, 17])
def test_any_number_of_rows_will_do(rows: int, converted: nn.Sequential) -> None:
    x = batch(rows)
    assert sqnr_db(step(converted, x), step(net(), x, autocast=False)) > 18
    assert step(converted, x[0]).isfinite().all()


def test_no_rows_at_all(converted: nn.Sequential) -> None:
    assert torch.equal(step(converted, batch(0)), step(net(), batch(0)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float, converted: nn.Sequential) -> None:
    x = batch()
    x[3, 5] = bad
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = converted[0](x)
    assert not output[3].isfinite().any()
    (gradient,) = torch.autograd.grad(output.float().nan_to_num(0).sum() * bad, [converted[0].weight])
    assert not gradient.isfinite().all()


def test_transforms_of_torch_func_run_as_in_bf16(converted: nn.Sequential) -> None:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return functional_call(converted, parameters, (row[None],)).float().square().sum()

    weights = {n: p.detach() for n, p in converted.named_parameters()}
    per_sample = vmap(grad(loss), (None, 0))(weights, batch())
    assert sqnr_db(per_sample["2.weight"].sum(0).flatten(), _gradient_of(net(), "2.weight")) > 30


def _gradient_of(module: nn.Module, name: str) -> Tensor:
    module(batch()).square().sum().backward()
    return module.get_parameter(name).grad.flatten()


def test_functional_call_computes_with_the_weights_that_it_is_given(converted: nn.Sequential) -> None:
    weights = {n: (3 * p).detach().requires_grad_() for n, p in converted.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = functional_call(converted, weights, (batch(),)).float()
    assert sqnr_db(output, functional_call(net(), weights, (batch(),))) > 18
    output.sum().backward()
    assert all(w.grad is not None for w in weights.values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_is_recomputed_in_fp8(reentrant: bool, converted: nn.Sequential) -> None:
    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        converted.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            output = run(batch().requires_grad_())
        output.float().square().sum().backward()
        return [p.grad for p in converted.parameters()]

    recomputed = gradients(lambda x: checkpoint(converted, x, use_reentrant=reentrant))  # pyright: ignore[reportReturnType]
    torch.testing.assert_close(recomputed, gradients(converted), rtol=0, atol=0)


def test_a_frozen_or_pruned_layer_runs_as_it_did(converted: nn.Sequential) -> None:
    plain = net()
    for module in (converted, plain):
        for layer in (module[0], module[4]):
            layer.weight.requires_grad_(False)
        torch.nn.utils.prune.identity(module[2], "weight")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(converted(batch()), plain(batch()))


def test_layers_are_in_fp8_inside_alone(stage: Stage) -> None:
    module = net()
    layers = linears_in_fp8(module, {"2"}, emulated(), "cpu", stage)
    has = lambda: ["forward" in vars(m) for m in module]  # noqa: E731
    assert not any(has())
    with layers:
        with layers:
            assert has() == [False, False, True, False, False]
        assert has() == [False, False, True, False, False]
    assert not any(has())


# -- torchao's own product, which can replace ours when `test_torchao_cannot_differentiate_twice` fails ----------------


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


def test_torchao_cannot_differentiate_twice() -> None:
    layer = nn.Linear(32, 32)
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    twin = float8_twin(layer, emulated())
    with torch.autocast("cpu", torch.bfloat16):
        output = twin(twin(x))
    with pytest.raises(AssertionError, match="Float8TrainingTensor"):
        (gradient,) = torch.autograd.grad(output.float().tanh().sum(), x, create_graph=True)
        torch.autograd.grad(gradient.float().square().sum(), layer.weight)
