"""From operations to facts."""

from __future__ import annotations

from typing import Any

import torch

from lightning_amp.measure import BACKWARD, FORWARD
from lightning_amp.profiling import _analysis
from lightning_amp.profiling._operations import Operation
from lightning_amp.tracing import Place

LINE = Place("nowhere.py", 7)


def product(module: str = "a", dtype: str = "bfloat16", flops: int = 100, **changes: Any) -> Operation:
    return Operation("mm", **{"part": FORWARD, "module": module, "dtype": dtype, "flops": flops, **changes})


def cast(**changes: Any) -> Operation:
    return Operation("_to_copy", **{"part": FORWARD, "cast_bytes": 10, "seconds": 0.1, "module": "a", **changes})


def test_flops() -> None:
    found = [product(), product("b", "float32", 300), product(part=BACKWARD, flops=200), Operation("t", FORWARD)]
    assert _analysis.flops_by_dtype(found) == {"bfloat16": 300, "float32": 300}
    assert _analysis.flops_by_module(found) == {"b": {"float32": 300}, "a": {"bfloat16": 100}}


def test_reasons() -> None:
    found = _analysis.reasons(
        [
            product(autocast=True),
            product("head", "float32", 5, in_fp32_module=True),
            product("b", "float32", 4, place=LINE),
            product("b", "float32", 3, place=LINE),
            product("b", "float64", 2, place=LINE),
            product("c", "float32", 1, autocast=True, asked="torch.bilinear"),
            product("c", "float32", 1, autocast=True, asked="torch.nn.functional.scaled_dot_product_attention"),
            product("d", "float32", 9, part=BACKWARD),
        ]
    )
    assert [(r.why, r.where, r.flops) for r in found] == [
        ("autocast off", "nowhere.py:7", 7),
        ("fp32_modules", "head", 5),
        ("float64", "nowhere.py:7", 2),
        ("not on autocast's list", "mm in c", 1),
        ("attention in fp32", "c", 1),
    ]


def test_casts_by_kind() -> None:
    found = _analysis.casts(
        [
            cast(asked="torch.Tensor.float", place=LINE),
            cast(asked="torch.Tensor.float", place=LINE),
            cast(cast_of=5, asked="torch.nn.functional.linear", place=LINE),
            cast(cast_of=5, asked="torch.nn.functional.linear"),
            cast(cast_of=6),
            cast(cast_of=7, asked="torch.Tensor.to", place=LINE),  # which autocast need not do then
            cast(part=BACKWARD, seconds=0.05),
        ]
    )
    assert {(c.kind, c.where): (c.count, c.num_bytes) for c in found} == {
        ("explicit", "nowhere.py:7"): (2, 20),
        ("weight", "a"): (3, 30),
        ("weight again", "a"): (1, 10),
        ("activation", BACKWARD): (1, 10),
    }


def test_casts_of_many_places_are_summed_up() -> None:
    found = _analysis.casts([cast(module=f"m{i}", seconds=i) for i in range(20)])
    assert len(found) == 9
    assert sum(c.count for c in found) == 20
    assert found[-1].where == "12 other places"


def test_padding_is_measured_for_what_is_not_aligned() -> None:
    half = {"dtype": "bfloat16", "flops": 10}
    found = _analysis.unaligned(
        [
            product("a", sizes=(64, 64, 64), **half),
            product("b", sizes=(64, 33, 100), **half),
            product("b", sizes=(64, 33, 100), part=BACKWARD, **half),
            product("c", sizes=(64, 64, 10), **half),  # a head of ten classes is not worth it
            product("d", sizes=(64, 33, 64), dtype="float32"),
        ],
        8,
        torch.device("cpu"),
        budget_s=0.05,
    )
    (one,) = found
    assert (one.sizes, one.padded, one.module, one.count, one.flops) == ((64, 33, 100), (64, 40, 104), "b", 2, 20)
    assert one.seconds > 0
    assert one.padded_seconds > 0


def test_products_without_the_time_of_a_call() -> None:
    calls = [Operation("t", FORWARD, seconds=0.1) for _ in range(3)]
    assert abs(_analysis.product_s([*calls, product(seconds=0.5), product(seconds=0.05)]) - 0.4) < 1e-9
    assert _analysis.product_s([product(seconds=0.5)]) == 0.5


def test_products_that_are_slower_than_in_fp32() -> None:
    now = [product("a", seconds=2.0), product("b", seconds=5.0), product("c", seconds=1.0)]
    fp32 = [product("a", seconds=1.0), product("b", seconds=1.0), product("c", seconds=2.0)]
    found = _analysis.slower_products(now, fp32)
    assert [(p.where, p.operation, p.seconds, p.fp32_s) for p in found] == [
        ("b", "mm", 5.0, 1.0),
        ("a", "mm", 2.0, 1.0),
    ]
