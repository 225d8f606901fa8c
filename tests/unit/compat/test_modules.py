"""Private names of torch around modules still do what we need of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_amp._compat import _modules


def test_names_are_those_before_anything_was_wrapped() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = dict(net.named_parameters())
    net[0] = checkpoint_wrapper(net[0])
    net[1][0] = torch.compile(net[1][0], backend="eager")
    wrapped: Any = torch.compile(net, backend="eager")
    assert not names.keys() & dict(wrapped.named_parameters()).keys()
    assert _modules.plain_parameters(wrapped) == names
    assert _modules.uncompiled_module(wrapped) is net
    assert _modules.uncompiled_module(net) is None


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_each_way_of_compiling() -> None:
    class Compiled(nn.Module):
        @torch.compile(backend="eager")
        def forward(self, x: Tensor) -> Tensor:
            return x

    in_place = nn.Linear(2, 2)
    assert not _modules.is_compiled(in_place)
    in_place.compile(backend="eager")
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert all(
        map(_modules.is_compiled, (in_place, torch.compile(nn.Linear(2, 2), backend="eager"), Compiled(), scripted))
    )


def test_parameters_for_the_length_of_a_call() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    parameters = _modules.own_parameters(layer)
    _modules.set_own_parameters(layer, {**parameters, "weight": torch.zeros(2, 2)})
    assert torch.equal(layer(x)[0], layer.bias)
    _modules.set_own_parameters(layer, parameters)
    assert isinstance(layer.weight, nn.Parameter)


def test_values_behind_transforms() -> None:
    seen: list[tuple[int, ...]] = []

    def double(x: Tensor) -> Tensor:
        with _modules.outside_transforms():
            seen.append(tuple((_modules.behind_transforms(x) * 2).shape))
        assert _modules.is_transformed_or_traced()
        return x * 2

    torch.func.vmap(torch.func.grad(lambda x: double(x).sum()))(torch.ones(3, 2))
    assert seen == [(3, 2)]
    assert not _modules.is_transformed_or_traced()


def test_an_object_whose_class_was_swapped_is_pickled_as_its_own() -> None:
    linear, pickled = nn.Identity(), list[str]()
    swapped = _modules.swap_class(linear, {"forward": lambda self, x: -x}, lambda: pickled.append("about to"))
    assert type(linear) is swapped is not nn.Identity
    assert linear(torch.ones(())) == -1
    for other in (copy.copy(linear), copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert type(other) is nn.Identity
        assert vars(other).keys() == vars(linear).keys()
    assert pickled == ["about to"] * 3


def test_buffers_that_are_not_there_yet_and_edits() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("later", None)
    assert _modules.buffer_names(norm) == ["running_mean", "running_var", "num_batches_tracked", "later"]
    before = _modules.version(norm.running_mean)
    norm.running_mean.add_(1)
    assert _modules.version(norm.running_mean) == before + 1
    stateless = nn.BatchNorm1d(2, track_running_stats=False)
    assert _modules.norm_modules(nn.Sequential(norm, nn.Linear(2, 2), stateless, nn.LayerNorm(2))) == [norm]
