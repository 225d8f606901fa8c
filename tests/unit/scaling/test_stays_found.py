"""A flag lasts until the gradients in which it was found are gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_amp.scaling._gradient_state import _StaysFound as StaysFound

BAD, FINE = torch.tensor(1.0), torch.tensor(0.0)


def kept(parameter: nn.Parameter) -> StaysFound:
    found = StaysFound()
    parameter.grad = torch.full_like(parameter, 0.1)  # an infinity after clipping
    found.keep(BAD, [nn.Parameter(torch.ones(1)), parameter])
    return found


def leave(parameter: nn.Parameter) -> None:
    pass


def drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


def zero(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


@pytest.mark.parametrize(("change", "stays"), [(leave, 1.0), (drop, 0.0), (zero, 0.0)])
def test_a_backward_past_the_plugin_looks_at_what_is_left(change: Callable[[nn.Parameter], None], stays: float) -> None:
    parameter = nn.Parameter(torch.ones(2))
    found = kept(parameter)
    change(parameter)
    (parameter * 2).sum().backward()
    assert float(found.beside(FINE)) == stays


def test_a_sparse_gradient_that_is_left() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    found = StaysFound()
    found.keep(BAD, [table.weight])
    table(torch.tensor([2])).sum().backward()
    assert float(found.beside(FINE)) == 1.0


@pytest.mark.parametrize(("left", "stays"), [(None, 0.0), (0.0, 0.0), (0.1, 1.0), (torch.nan, 1.0)])
def test_the_plugins_backward_decides_by_all_gradients(left: float | None, stays: float) -> None:
    parameter = nn.Parameter(torch.ones(2))
    found = kept(parameter)
    found.begin_backward(None if left is None else torch.tensor(left))
    parameter.grad = None
    (parameter * 2).sum().backward()  # the hook on the parameter was removed
    assert float(found.beside(FINE)) == stays


def test_nothing_is_left_on_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    found = kept(parameter)
    found.keep(FINE, [parameter])
    assert float(found.beside(FINE)) == 1.0
    found.forget()
    assert found.is_empty
    assert not parameter._backward_hooks
    assert float(found.beside(FINE)) == 0.0
