"""A step that is no faster in mixed precision: its reason, and the recommendation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.doctor_facts import (
    FORWARD_FLOPS,
    cast,
    machine_with,
    noisy,
    only,
    product,
    said,
    speed,
    step,
    timed,
    without_autocast,
)

from lightning_amp.advice._record import Operation, Recording, Step, Variant
from lightning_amp.advice.findings._not_faster import reason_of, slower_products
from lightning_amp.measure import BACKWARD

KERNEL = product(name="convolution_backward", part=BACKWARD, seconds=0.09)
FAST_KERNEL = Recording((product(name="convolution_backward", part=BACKWARD, seconds=0.001),))


def small(*extra: Operation, **changes: Any) -> Step:
    variants = (timed("as it is", 0.1), timed("fp32", 0.1))
    return step(*extra, **{"fp32_product_share": 0.1, "variants": variants, **changes})


def slow(*extra: Operation, **changes: Any) -> Step:
    return step(*extra, **{"variants": (timed("as it is", 0.2), timed("fp32", 0.1)), **changes})


def test_a_model_that_is_too_small() -> None:
    found = only(small())
    assert (found.severity, found.code) == ("warning", "model-too-small")
    assert "10 % of a step in fp32. They alone make a step 1.1x as fast at best; measured: as fast" in found.message
    assert found.action.startswith("Try `torch.compile`")
    larger = small(variants=(*small().variants, timed("4 times the batch", 0.2)))
    assert "trains its rows 2.0" in only(larger).action
    slower = small(variants=(timed("as it is", 0.12), timed("fp32", 0.1)))
    assert only(slower).action == 'Use `AmpPrecision("fp32")`.'


def test_undecided_times_are_called_undecided() -> None:
    found = only(small(fp32_product_share=0.01, variants=(timed("as it is", 0.1), noisy("fp32", 0.1))))
    assert (found.severity, found.code) == ("note", "model-too-small")
    assert "1.01x as fast at best; measured: speed undecided: " in found.message


def test_another_reason_explains_a_step_that_is_no_faster_but_not_one_that_is_slower() -> None:
    off = without_autocast(FORWARD_FLOPS)
    assert only(small(off)).code == "autocast-off"
    assert [f.code for f in said(slow(off))] == ["autocast-off", "not-faster"]


def test_a_slower_step_is_reported_with_its_reason() -> None:
    found = only(slow())
    assert (found.severity, found.code) == ("warning", "not-faster")
    assert "A step is 2.0" in found.message
    assert "x as slow" in found.message
    assert found.action == 'Use `AmpPrecision("fp32")`.'
    casts = slow(*(cast(0.01, 2**18, cast_of=pointer) for pointer in range(1, 5)))
    assert "casts take 40 ms" in only(casts).message
    larger = slow(variants=(*slow().variants, timed("4 times the batch", 0.2)))
    assert only(larger).action.startswith('Use `AmpPrecision("fp32")`. A batch 4 times as large')


@pytest.mark.parametrize("products", [4.0, 1.0, 0.5, None])
def test_a_slow_kernel_is_named_whatever_products_gain(products: float | None) -> None:
    found = only(
        slow(KERNEL, fp32_product_share=0.05, fp32_recorded=FAST_KERNEL, product_s=0.01), machine_with(bf16=products)
    )
    assert found.code == "not-faster"
    assert "`convolution_backward` in the backward takes 90 ms, and 1 ms in fp32" in found.message


def test_products_that_are_slow_here_are_the_reason_of_a_slow_step() -> None:
    found = only(slow(), machine_with(bf16=0.5))
    assert "large matrix products in bf16 are 2.0" in found.message
    assert "x as slow" in found.message


def test_products_that_gain_nothing_are_the_reason_of_a_step_that_gains_nothing() -> None:
    same = step(variants=(timed("as it is", 0.1), timed("fp32", 0.1)))
    found = only(same, machine_with(bf16=1.0))
    assert (found.severity, found.code) == ("note", "no-faster-products")
    assert "they gain no speed here" in found.message
    assert said(same, machine_with(bf16=speed(1.2, noise=0.8))) == []


def test_a_step_whose_products_allow_more_is_reported() -> None:
    found = only(step(recorded_s=0.2, variants=(timed("as it is", 0.1), noisy("fp32", 0.1))))
    assert (found.severity, found.code) == ("note", "not-faster")
    assert "could make faster are 80 % of a step in fp32, but in one recorded step" in found.message
    assert "all other operations take 150 ms, and the products 50 ms" in found.message


def test_a_kernel_that_takes_little_is_no_reason() -> None:
    assert reason_of(step(product("a", seconds=0.002), fp32_recorded=Recording((product("a", seconds=0.001),)))) is None
    kernel = {"module": "net.conv", "name": "convolution"}
    fp32 = Recording((product(**kernel, seconds=0.01),))
    named = reason_of(step(product(**kernel, seconds=0.1), fp32_recorded=fp32, recorded_s=0.2))
    assert named is not None
    assert named.text.startswith("in one recorded step of each, `convolution` in module `net.conv` takes 100 ms")


def test_one_run_is_no_evidence() -> None:
    once = (timed("as it is", 0.1, rounds=1), timed("fp32", 0.1, rounds=1))
    assert said(step(variants=once)) == []
    faster = (timed("as it is", 0.1, rounds=1), timed("fp32", 0.18, rounds=1))
    assert said(small(variants=faster)) == []


def test_one_run_that_agrees_with_the_products_is() -> None:
    minute = slow(variants=(timed("as it is", 61.0, rounds=1), timed("fp32", 0.61, rounds=1)))
    found = only(minute, machine_with(bf16=0.02))
    assert "A step is 100x as slow as in fp32, one run of each" in found.message
    assert found.action == 'Use `AmpPrecision("fp32")`.'
    assert said(minute, machine_with(bf16=4.0)) == []


def test_no_speed_is_promised_where_fp32_was_not_timed() -> None:
    assert said(step(variants=(Variant("as it is", (0.1,)),))) == []
    assert said(replace(slow(), precision="fp32")) == []


def test_products_that_are_slower_than_in_fp32() -> None:
    now, fp32 = (
        Recording(tuple(product(module, seconds=s) for module, s in zip("abc", seconds, strict=True)))
        for seconds in ((2.0, 5.0, 1.0), (1.0, 1.0, 2.0))
    )
    found = slower_products(step(recorded=now, fp32_recorded=fp32))
    assert [(p.where, p.operation, p.seconds, p.fp32_s) for p in found] == [
        ("b", "mm", 5.0, 1.0),
        ("a", "mm", 2.0, 1.0),
    ]
