"""Products of the forward that stay in fp32, by reason and place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.doctor_facts import (
    FORWARD_FLOPS,
    LINE,
    in_fp32_modules,
    only,
    product,
    said,
    step,
    timed,
    without_autocast,
)

from lightning_amp._user_line import Place
from lightning_amp.advice._record import Operation
from lightning_amp.advice.findings._fp32_products import fp32_products
from lightning_amp.measure import BACKWARD

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


def test_the_reason_of_each_operation() -> None:
    found = step(
        product(autocast=True),
        in_fp32_modules("head", 5),
        without_autocast(4),
        without_autocast(3),
        product("b", "float64", 2, place=LINE),
        product("c", "float32", 1, autocast=True, asked="torch.bilinear"),
        product("c", "float32", 1, autocast=True, asked=ATTENTION),
        product("d", "float32", 9, part=BACKWARD),
    )
    assert [(r.why, r.where, r.flops) for r in fp32_products(found)] == [
        ("autocast off", "nowhere.py:7", 7),
        ("fp32_modules", "head", 5),
        ("float64", "nowhere.py:7", 2),
        ("not on autocast's list", "mm in c", 1),
        ("attention in fp32", "c", 1),
    ]
    assert fp32_products(replace(found, precision="fp32")) == ()


def kept(why: str, where: str, flops: int) -> Operation:
    own: dict[str, Any] = {
        "autocast-off": {},
        "float64": {"dtype": "float64"},
        "not-on-autocast-list": {"autocast": True},
        "attention-in-fp32": {"autocast": True, "asked": ATTENTION},
    }[why]
    place = Place(where, 7) if where else None
    return product(**{"module": "", "dtype": "float32", "flops": flops, "place": place, **own})


@pytest.mark.parametrize(
    ("code", "prefix"),
    [("autocast-off", ""), ("float64", ""), ("not-on-autocast-list", "mm in "), ("attention-in-fp32", "")],
)
def test_products_that_stay_in_fp32(code: str, prefix: str) -> None:
    found = only(step(kept(code, "net.py", FORWARD_FLOPS // 2), kept(code, "", 2), kept(code, "c.py", 1)))
    assert (found.severity, found.code) == ("warning", code)
    assert found.message.startswith("50 % of the FLOPs of the forward")
    module = "the module" if prefix else "the module itself"
    assert f"{prefix}net.py:7; {prefix}{module}, and in 1 other place." in found.message
    assert only(step(kept(code, "net.py", FORWARD_FLOPS // 20))).severity == "note"
    assert not said(step(kept(code, "net.py", FORWARD_FLOPS // 100)))


def test_fp32_modules_that_hold_most() -> None:
    facts = step(in_fp32_modules("net.head", FORWARD_FLOPS // 2))
    found = only(facts)
    assert (found.severity, found.code) == ("warning", "fp32-modules-dominate")
    assert "`net.head`" in found.message
    assert "find_fp32_modules" in found.action
    tried = replace(facts, variants=(*facts.variants, timed("without fp32_modules", 0.05)))
    assert "without it, tried here: 2.00x as fast" in only(tried).message
    costs_nothing = replace(facts, variants=(*facts.variants, timed("without fp32_modules", 0.1)))
    assert only(costs_nothing).severity == "note"
