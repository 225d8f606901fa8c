"""Which product and which convolution a machine is judged by."""

from __future__ import annotations

from dataclasses import replace

from support.doctor_facts import machine, speed

from lightning_amp.advice._machine import Convolution, Product


def test_only_formats_that_were_compared_with_fp32_have_a_speed() -> None:
    found = machine().speed("bf16")
    assert found is not None
    assert (round(found.ratio, 1), found.claim) == (4.0, "faster")
    assert machine().format("fp4") is machine().speed("fp4") is machine().speed("fp32") is None
    assert machine(products=(Product("bf16", 256, 4.0),)).speed("bf16") is None


def test_the_largest_product_with_the_most_rounds_is_judged() -> None:
    sizes = ((256, 9), (512, 9), (1024, 3))
    found = machine(products=tuple(Product("bf16", n, 1.0, speed(2.0, rounds=r)) for n, r in sizes))
    product = found.compared_product("bf16")
    assert product is not None
    assert product.size == 512


def test_the_slowest_convolution_is_one_that_is_slower() -> None:
    ratios = {("forward", 1): 0.5, ("backward", 1): 2.0, ("backward", 2): 0.1, ("forward", 2): 1.0}
    probed = tuple(Convolution("bf16", part, stride, speed(r)) for (part, stride), r in ratios.items())  # type: ignore[arg-type]
    slowest = machine(convolutions=probed).slowest_convolution("bf16")
    assert slowest is not None
    assert (slowest.part, slowest.stride) == ("backward", 2)
    undecided = tuple(replace(c, speed=speed(0.5, noise=0.9)) for c in probed)
    assert machine(convolutions=undecided).slowest_convolution("bf16") is None
