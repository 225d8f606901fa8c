"""The table of operations: names, operations in place, arguments that must not be 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_amp.tracing._operations import argument_of, known_operation


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Tensor.__truediv__, "div"),
        (torch.true_divide, "div"),
        (Tensor.__rtruediv__, "div"),
        (Tensor.div_, "div_"),
        (Tensor.__setitem__, "assignment"),
        (Tensor.__matmul__, "matmul"),
        (Tensor.half, "to"),
        (torch.exp, "exp"),
        (torch.nn.functional.cross_entropy, "cross_entropy"),
        (Tensor.size, None),
        (Tensor.backward, None),
        (torch.empty, None),
    ],
)
def test_names(function: object, name: str | None) -> None:
    found = known_operation(function)
    assert (found and found.name) == name


@pytest.mark.parametrize(("function", "writes"), [(Tensor.mul_, True), (Tensor.__setitem__, True), (Tensor.mul, False)])
def test_what_writes_into_its_argument(function: object, writes: bool) -> None:
    found = known_operation(function)
    assert found is not None
    assert found.is_in_place == writes


def test_a_number_divided_by_a_tensor_is_understood_as_a_reciprocal() -> None:
    found = known_operation(Tensor.__rtruediv__)
    assert found is not None
    assert (found.name, found.known_as) == ("div", "reciprocal")


def test_what_must_not_be_zero() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert argument_of("div", (a, b), {}) is b
    assert argument_of("div", (a,), {"other": b}) is b
    assert argument_of("reciprocal", (b, 1), {}) is b
    assert argument_of("xlogy", (a, b), {}) is b
    assert argument_of("sqrt", (), {"input": b}) is b
