"""A replaced method of a user's object leaves no trace on it, in copies or in pickles."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.casting import MethodOverride, Overrides


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def step(self, batch: Tensor, number: int = 0) -> tuple[Tensor, int]:
        """Return the owner, too."""
        return batch * self.weight + number, id(self)


class Doubled(MethodOverride):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, owner = self.inner(*args, **kwargs)
        return result * 2, owner


def value(module: Any) -> float:
    return module.step(torch.ones(1), number=2)[0].item()


def test_install_and_restore() -> None:
    module = Model()
    before, signature = dict(vars(module)), inspect.signature(module.step)
    doubled = Doubled(module, "step")
    assert not doubled.installed
    doubled.install()
    assert doubled.installed
    assert value(module) == 6
    assert inspect.signature(module.step) == signature
    assert module.step.__doc__ == "Return the owner, too."
    doubled.restore()
    doubled.restore()
    assert vars(module) == before
    assert value(module) == 3


def test_what_the_user_puts_there_in_the_meantime_stays() -> None:
    module, mine = Model(), lambda batch, number: None
    doubled = Doubled(module, "step")
    doubled.install()
    module.step = mine  # type: ignore[method-assign]
    assert not doubled.installed
    doubled.restore()
    assert module.step is mine


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("was_attribute", [False, True])
def test_copies_call_themselves(make: Any, was_attribute: bool) -> None:
    module = Model()
    if was_attribute:
        vars(module)["step"] = module.step
    Doubled(module, "step").install()
    other = make(module)
    with torch.no_grad():
        module.weight.zero_()
    assert other.step(torch.ones(1))[1] == id(other)
    assert value(other) == 3
    assert not any(isinstance(attribute, MethodOverride) for attribute in vars(other).values())
    assert make(other).step(torch.ones(1))[1] != id(other)


def test_several_overrides_as_a_context_that_may_be_entered_twice() -> None:
    module = Model()
    before = dict(vars(module))
    overrides = Overrides([Doubled(module, "step")])
    with overrides:
        with overrides:
            assert value(module) == 6
        assert value(module) == 6
    assert vars(module) == before
