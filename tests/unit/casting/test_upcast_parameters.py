"""Half-precision parameters become float32 in place, and the buffers beside them."""

from __future__ import annotations

import pytest
import torch
from support import assert_same
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_amp.casting import mend_rounding, sharded_parameters, upcast_like, upcast_parameters


def small() -> nn.Module:
    """20 values to train, 2 buffers of 4."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_objects_with_the_same_values(dtype: torch.dtype) -> None:
    module = small().to(dtype)
    parameters, buffers = [*module.parameters()], [*module.buffers()]
    values = {name: v.clone().float() for name, v in module.state_dict().items() if v.is_floating_point()}
    seen: list[torch.dtype] = []
    parameters[0].register_hook(lambda gradient: seen.append(gradient.dtype))
    result = upcast_parameters(module)
    assert all(a is b for a, b in zip([*parameters, *buffers], [*module.parameters(), *module.buffers()], strict=True))
    assert_same({k: v for k, v in module.state_dict().items() if v.is_floating_point()}, values)
    assert (len(result.parameters), result.num_values, result.num_buffers, result.num_bytes) == (4, 20, 2, 2 * 28)
    assert not result.before
    module(torch.randn(3, 2)).square().sum().backward()
    assert seen == [torch.float32]


def test_again_is_nothing() -> None:
    module = small()
    upcast_parameters(module)
    assert upcast_parameters(module) == (set(), {}, 0, 0, 0)


def test_a_tied_weight_counts_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).half()
    module[1].weight = module[0].weight
    module.register_parameter("again", module[0].weight)
    assert upcast_parameters(module).num_values == 9
    assert module[1].weight is module[0].weight
    assert module[1].weight.dtype == torch.float32


def test_a_gradient_that_is_there() -> None:
    module = nn.Linear(2, 1).to(torch.bfloat16)
    module(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    gradient = module.weight.grad
    upcast_parameters(module)
    assert module.weight.grad is gradient
    assert gradient is not None
    assert gradient.dtype == torch.float32


def test_frozen_parts_stay_with_their_buffers() -> None:
    """A frozen part, one without parameters in it, and one that is trained; a buffer at the top goes with it."""
    frozen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)).requires_grad_(False)
    trained = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    module = nn.ModuleDict({"frozen": frozen, "trained": trained})
    module.register_buffer("table", torch.zeros(3))
    module.register_buffer("count", torch.zeros(3, dtype=torch.long))
    module.to(torch.bfloat16)
    upcast_parameters(module)
    stay = [name for name, value in module.state_dict().items() if value.dtype == torch.bfloat16]
    assert stay == [n for n, v in module.state_dict().items() if n.startswith("frozen") and v.is_floating_point()]
    assert module["trained"][1].running_mean.dtype == module.table.dtype == torch.float32
    assert module.count.dtype == torch.long


def test_a_frozen_layer_beside_a_trained_one_keeps_its_statistics() -> None:
    module = small()
    module[1].requires_grad_(False)
    upcast_parameters(module)
    assert {v.dtype for v in module[1].state_dict().values()} == {torch.bfloat16, torch.long}


def test_parametrizations_and_lazy_modules() -> None:
    module = nn.Sequential(spectral_norm(nn.Linear(2, 2)), nn.LazyLinear(1)).to(torch.bfloat16)
    assert upcast_parameters(module).num_values == 6
    module(torch.randn(1, 2))
    assert {v.dtype for v in module.state_dict().values()} == {torch.float32}


def test_a_copy_goes_along() -> None:
    """By name, where the module has more or other names; what is half precision in the module stays so in the copy."""
    module, copy = nn.ModuleDict({"a": small(), "b": nn.Linear(1, 1).half()}), nn.ModuleDict({"a": small()})
    module["a"][0].requires_grad_(False)
    upcast_parameters(module)
    copy["c"] = nn.Linear(1, 1).half()
    upcast_like(copy, module)
    theirs = {name: value.dtype for name, value in module.state_dict().items()} | {
        "c.weight": torch.float16, "c.bias": torch.float16,
    }  # fmt: skip
    assert {n: v.dtype for n, v in copy.state_dict().items()} == {n: theirs[n] for n in copy.state_dict()}


def test_only_what_rounds_to_the_old_values_is_taken_from_a_checkpoint() -> None:
    module = nn.Linear(2, 1).to(torch.bfloat16)
    before = upcast_parameters(module, keep=True).before
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    with torch.no_grad():
        module.weight.mul_(1 + 1e-4)  # what was rounded
        module.bias.add_(1)  # something else
    mend_rounding(before)
    assert_same(module.weight.detach(), weight * (1 + 1e-4))
    assert_same(module.bias.detach(), bias)


def test_plain_parameters_are_no_shards() -> None:
    """Real ones are in `tests/distributed`."""
    assert sharded_parameters(small()) == {}
