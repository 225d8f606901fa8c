"""How operations are called, and where what is not finite came from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_amp.tracing import Key, OperationCall
from lightning_amp.tracing._operation_calls import is_in_place, largest_of, plain_operation


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
    assert plain_operation(function) == name


def test_what_writes_into_its_argument() -> None:
    assert is_in_place("mul_")
    assert is_in_place("assignment")
    assert not is_in_place("mul")


def call(number: int, *sources: OperationCall) -> OperationCall:
    made = OperationCall(Key(f"op{number}", None, 0), number, None)
    made.came_from([*sources, None, made, *sources])
    return made


def test_a_diamond_has_one_root_and_each_member_once() -> None:
    root = call(0)
    left, right = call(1, root), call(2, root)
    last = call(3, left, right)
    assert last.sources == [left, right]
    assert last.roots == [root]
    assert last.chain == [root, left, right, last]


def test_of_several_roots_the_first_is_first() -> None:
    late, early = call(5), call(1)
    assert call(7, late, early).roots == [early, late]


def test_the_largest_of_nothing() -> None:
    assert largest_of([torch.empty(0)]) is None
    assert largest_of([torch.tensor([torch.nan, -3.0])]) == 3
