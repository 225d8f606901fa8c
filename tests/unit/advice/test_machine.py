"""The measurements of a machine: products in rounds, and the support that follows from facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.doctor_facts import machine, speed

from lightning_amp.advice import _machine
from lightning_amp.advice._machine import Product, examine, product_of, support_of, timed

CPU = torch.device("cpu")


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Plan the seconds of a product by its format, or the exception that it raises; all others take 0.1 ms."""
    seconds: dict[str, Any] = {}

    def planned(name: str, sizes: Any, device: torch.device) -> Callable[[], float]:
        def call() -> float:
            found = seconds.get(name, 1e-4)
            if isinstance(found, Exception):
                raise found
            return found

        return call

    monkeypatch.setattr(_machine, "product_of", planned)
    return seconds


def test_products_are_compared_with_those_of_fp32_in_the_same_rounds(taking: dict[str, Any]) -> None:
    taking.update({"bf16": 2.5e-5, "fp16": 0.1})
    found = examine(CPU, short=True)
    bf16 = found.product("bf16")
    assert bf16 is not None
    assert bf16.speed is not None
    assert (bf16.size, bf16.speed.ratio, bf16.speed.num_repetitions) == (1024, pytest.approx(4.0), 9)
    assert bf16.tflops == pytest.approx(2 * 1024**3 / 2.5e-5 / 1e12)
    assert found.best_tflops("fp32") == pytest.approx(bf16.tflops / 4)
    assert [p.size for p in found.products if p.format == "fp16"] == [256]  # larger ones would take too long
    assert found.format("int4") is found.speed("int4") is found.speed("fp32") is None
    assert (found.memory_gib > 0, found.versions["torch"]) == (True, torch.__version__)


def test_a_product_that_fails_is_noted_and_the_others_go_on(taking: dict[str, Any]) -> None:
    taking["bf16"] = RuntimeError("no kernel\nfor this")
    found = examine(CPU, short=True)
    assert "bf16 products of 256 were not measured: RuntimeError: no kernel" in found.notes
    assert found.speed("bf16") is None
    assert len([p for p in found.products if p.format == "fp32"]) == 3


def test_one_slow_call_does_not_use_up_the_budget_of_all() -> None:
    calls = {"a": lambda: 0.01, "b": lambda: 5.0, "c": lambda: 0.1}
    assert {name: len(times) for name, times in timed(calls, 0.2).items()} == {"a": 9, "b": 1, "c": 2}


def test_fp32_is_measured_in_full() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert product_of("fp32", (32, 32, 32), CPU)() > 0
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_largest_product_with_the_most_rounds_is_judged() -> None:
    sizes = ((256, 9), (512, 9), (1024, 3))
    found = machine(products=tuple(Product("bf16", n, 1.0, speed(2.0, rounds=r)) for n, r in sizes)).product("bf16")
    assert found is not None
    assert found.size == 512


@pytest.mark.parametrize(
    ("name", "features", "support"),
    [("bf16", ["avx512_bf16"], "native"), ("bf16", [], "emulated"), ("fp16", [], "emulated"), ("fp8", [], "missing")],
)
def test_support_on_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str, features: list[str], support: str) -> None:
    monkeypatch.setattr(_machine, "cpu_has", lambda wanted: features)
    assert support_of(name, CPU)[0] == support


@pytest.mark.parametrize(
    ("capability", "name", "support"),
    [
        ((7, 5), "bf16", "emulated"),  # a T4 says that it supports bf16
        ((7, 5), "fp16", "native"),
        ((6, 1), "fp16", "emulated"),
        ((9, 0), "bf16", "native"),
        ((9, 0), "fp8", "native"),
    ],
)
def test_support_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, support: str
) -> None:
    monkeypatch.setattr(_machine, "runnable", lambda device: ["bf16", "fp16", "fp8", "fp32"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert support_of(name, torch.device("cuda", 0))[0] == support


@pytest.mark.parametrize(
    ("version", "device_type", "number"),
    [("2.12.0+cpu", "cpu", 0), ("2.13.0+cpu", "cpu", 1), ("2.13.0", "cuda", 1), ("2.13.0a0+git1", "cpu", 0)],
)
def test_known_faults(version: str, device_type: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert len(list(_machine._traps(device_type))) == number
