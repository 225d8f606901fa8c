"""The search over a tree, with evaluators that know the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import pytest

from lightning_amp.tune._fp32_search import Found, Tree, search


def tree(inside: dict[str, tuple[str, ...]]) -> Tree:
    """Return a tree in which each module has an entry."""
    return {**{name: () for names in inside.values() for name in names}, **inside}


DEEP = tree(
    {
        "": ("embed", "blocks", "head"),
        "blocks": tuple(f"blocks.{i}" for i in range(12)),
        **{f"blocks.{i}": (f"blocks.{i}.attn", f"blocks.{i}.norm", f"blocks.{i}.mlp") for i in range(12)},
        **{f"blocks.{i}.attn": tuple(f"blocks.{i}.attn.{x}" for x in "qkvo") for i in range(12)},
    }
)
FLAT = tree({"": tuple(str(i) for i in range(200))})


def covered(names: Collection[str], name: str) -> bool:
    """Return whether a module, or one around it, is among the names."""
    return any(name == other or name.startswith(f"{other}.") for other in names)


def needs(*culprits: str) -> Callable[[tuple[str, ...]], bool]:
    """Return an evaluator that passes if all culprits are in fp32."""
    return lambda names: all(covered(names, culprit) for culprit in culprits)


def names_of(found: Found) -> set[str]:
    assert found.names is not None
    return set(found.names)


@pytest.mark.parametrize("culprit", ["head", "blocks.7", "blocks.7.norm", "blocks.0.attn.q", "blocks.11.attn"])
def test_one_culprit(culprit: str) -> None:
    found = search(DEEP, needs(culprit), {})
    assert names_of(found) == {culprit}
    assert found.complete
    assert found.num_tried < 25


def test_two_that_only_help_together() -> None:
    assert names_of(search(DEEP, needs("embed", "blocks.3.attn.v"), {})) == {"embed", "blocks.3.attn.v"}


def test_the_same_layer_of_every_block() -> None:
    inside = [f"blocks.{i}.norm" for i in range(12)]
    found = search(DEEP, needs(*inside), dict.fromkeys(inside, 2.0))
    assert names_of(found) == set(inside)
    assert found.complete


def test_a_block_of_its_own_kind() -> None:
    """The code of blocks 2 and 3 themselves, not a module inside them."""
    assert names_of(search(DEEP, needs("blocks.2", "blocks.3"), {})) == {"blocks.2", "blocks.3"}


def test_layers_in_a_row_are_not_alike_inside() -> None:
    layers = tree({"": ("0", "1", "2"), "1": ("1.a", "1.b"), "2": ("2.a",)})
    for culprits in (("1.a",), ("0", "1.b"), ("0", "2.a"), ("1",)):
        assert names_of(search(layers, needs(*culprits), {})) == set(culprits)


def test_what_is_suspected_is_left_out_last() -> None:
    blind = search(FLAT, needs("17", "150"), {})
    guided = search(FLAT, needs("17", "150"), {"17": 2.0, "150": math.inf})
    assert names_of(blind) == names_of(guided) == {"17", "150"}
    assert guided.num_tried < 0.7 * blind.num_tried


def test_nothing_helps() -> None:
    assert search(DEEP, lambda names: False, {}).names is None


def test_where_all_inside_is_needed_the_module_around_is_named() -> None:
    inside = [name for i in range(12) for name in DEEP[f"blocks.{i}"]]
    assert search(DEEP, needs(*inside), {}, most=500).names == ("blocks",)
    assert names_of(search(DEEP, needs(*DEEP["blocks.3.attn"]), {})) == {"blocks.3.attn"}


def test_a_module_around_one_is_not_named_for_it() -> None:
    around = tree({"": ("a", "b"), "a": ("a.inner",)})
    assert search(around, needs("a.inner"), {}).names == ("a.inner",)
    assert search(around, needs("a"), {}).names == ("a",)  # its own code


@pytest.mark.parametrize("most", [12, 20])
def test_a_budget_that_ends_early_leaves_what_passes(most: int) -> None:
    evaluator = needs("3", "77", "120", "199")
    found = search(FLAT, evaluator, {}, most=most)
    assert found.names is not None
    assert evaluator(found.names)
    assert not found.complete
    assert found.num_tried <= most


def test_no_set_is_evaluated_twice() -> None:
    seen: list[frozenset[str]] = []

    def passes(names: tuple[str, ...]) -> bool:
        seen.append(frozenset(names))
        return needs("blocks.2.norm", "blocks.9.attn.k", "head")(names)

    found = search(DEEP, passes, {})
    assert names_of(found) == {"blocks.2.norm", "blocks.9.attn.k", "head"}
    assert len(seen) == len(set(seen)) == found.num_tried
