"""Special arguments of an operation are found, and the operations that its non-finite values came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp.tracing import Key, OperationCall
from lightning_amp.tracing._operation_calls import facts_of, largest_of, smallest_magnitude
from lightning_amp.tracing._operations import pole_of

INF = float("inf")
ROWS = torch.tensor([[1.0, 2.0], [-INF, -INF]])
PLAIN: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "kind", "index", "count"),
    [
        ("mean", (torch.empty(0),), PLAIN, "empty", (), 0),
        ("mse_loss", (torch.empty(0, 2), torch.empty(0, 2)), PLAIN, "empty", (), 0),
        ("mean", (torch.ones(2),), PLAIN, "", (), 0),
        ("cross_entropy", (torch.ones(2, 3), torch.tensor([-100, -100])), PLAIN, "ignored", (), 0),
        ("cross_entropy", (torch.ones(2, 3), torch.tensor([7, 7])), {"ignore_index": 7}, "ignored", (), 0),
        ("cross_entropy", (torch.ones(2, 3), torch.tensor([-100, 1])), PLAIN, "", (), 0),
        ("softmax", (ROWS, -1), PLAIN, "masked", (1,), 1),
        ("softmax", (ROWS.T,), {"dim": 0}, "masked", (1,), 1),
        ("log_softmax", (ROWS, 0), PLAIN, "", (), 0),
        ("softmax", (torch.stack([ROWS, ROWS]), -1), PLAIN, "masked", (0, 1), 2),
        ("std", (torch.ones(1),), PLAIN, "one", (), 0),
        ("var", (torch.ones(3, 1), 1), PLAIN, "one", (), 0),
        ("std", (torch.ones(3, 1), 0), PLAIN, "", (), 0),
        ("masked_fill", (torch.ones(2), torch.ones(2) > 0, -INF), PLAIN, "literal", (), 0),
        ("to", (torch.ones(2), torch.float16), PLAIN, "cast", (), 0),
        ("div", (torch.ones(3), torch.tensor([1.0, 0, 0])), PLAIN, "zero", (1,), 2),
        ("div", (torch.zeros(3), torch.ones(3)), PLAIN, "", (), 0),
        ("div", (torch.ones(3), 0.0), PLAIN, "zero", (), 1),
        ("reciprocal", (torch.tensor(0.0), 1), PLAIN, "zero", (), 1),
        ("log", (torch.tensor([2.0, 0.0]),), PLAIN, "zero", (1,), 1),
        ("sqrt", (torch.tensor([0.0, -1.0]),), PLAIN, "negative", (1,), 1),
        ("pow", (torch.tensor([0.0]), 2), PLAIN, "", (), 0),
        ("pow", (torch.tensor([0.0]), 0.5), PLAIN, "zero", (0,), 1),
        ("acos", (torch.tensor([0.0, 1.0]),), PLAIN, "zero", (1,), 1),
        ("acos", (torch.tensor([0.0, 1.5]),), PLAIN, "negative", (1,), 1),
        ("log1p", (torch.tensor([0.0, -1.0]),), PLAIN, "zero", (1,), 1),
        ("log1p", (torch.tensor([0.0, -2.0]),), PLAIN, "negative", (1,), 1),
        ("logit", (torch.tensor([0.5, 1.0]),), PLAIN, "zero", (1,), 1),
        ("logit", (torch.tensor([0.5, 1.5]),), PLAIN, "negative", (1,), 1),
        ("sum", (torch.ones(2, 3),), PLAIN, "sum", (), 6),
        ("sum", (torch.ones(2, 3), 1), PLAIN, "sum", (), 3),
        ("sum", (torch.ones(2, 3),), {"dim": (0, 1)}, "sum", (), 6),
        ("sum", (torch.tensor([1.0, INF]),), PLAIN, "", (), 0),
        ("add", (torch.zeros(2), torch.zeros(2)), PLAIN, "", (), 0),
    ],
)
def test_facts(name: str, args: Any, kwargs: Any, kind: str, index: tuple[int, ...], count: int) -> None:
    found = facts_of(name, args, kwargs)
    assert (found.kind, found.index, found.count) == (kind, index, count)


def test_masks_of_attention_mean_opposite_things() -> None:
    x, mask = torch.ones(1, 2, 4), torch.tensor([[True, False], [False, False]])
    found = facts_of("scaled_dot_product_attention", (x, x, x), {"attn_mask": mask})
    assert (found.kind, found.index) == ("masked", (1,))
    padding = torch.tensor([[False, False], [True, True]])
    found = facts_of("multi_head_attention_forward", (x, x, x), {"key_padding_mask": padding})
    assert (found.kind, found.index) == ("masked", (1,))


def test_the_distance_to_where_a_derivative_is_infinite() -> None:
    def smallest(name: str, value: Tensor, *others: Any) -> float | None:
        pole = pole_of(name, (value, *others), {})
        found = None if pole is None else smallest_magnitude(name, pole)
        return None if found is None else float(found)

    assert smallest("sqrt", torch.tensor([4.0, 0.25])) == 0.25
    assert smallest("acos", torch.tensor([0.0, -0.75])) == 0.25
    assert smallest("log1p", torch.tensor([3.0, -0.75])) == 0.25
    assert smallest("logit", torch.tensor([0.5, 0.75])) == 0.25
    assert smallest("pow", torch.tensor([0.0]), 2) is None
    assert smallest("pow", torch.tensor([0.5]), 0.5) == 0.5
    assert smallest("add", torch.tensor([0.0])) is None
    assert smallest("sqrt", torch.empty(0)) is None


def call(number: int, *sources: OperationCall) -> OperationCall:
    made = OperationCall(Key(f"op{number}", None, 0), number, None, "")
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
