"""The timing of products and convolutions in rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.planned_race import PlannedClock

from lightning_amp.advice import _probes
from lightning_amp.advice._probes import Probe, call_s, convolutions, product, products, time_probes
from lightning_amp.measure import _device_clock

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PlannedClock:
    clock = PlannedClock()
    monkeypatch.setattr(_device_clock, "time", clock)
    return clock


def planned(clock: PlannedClock, most_s: float, **seconds: float) -> tuple[dict[str, list[float]], str]:
    """Time probes that take planned seconds; return their times and the order of their calls."""
    turns: list[str] = []

    def probe(name: str) -> Probe:
        return Probe(name, lambda: turns.append(name) or clock.sleep(seconds[name]))

    return time_probes({name: probe(name) for name in seconds}, CPU, most_s), "".join(turns)


def test_each_probe_runs_in_nine_rounds(clock: PlannedClock) -> None:
    found, turns = planned(clock, 0.15, a=0.01, b=0.01, c=0.01)
    assert turns.startswith("abc" + "cba" + "abc" + "cba")
    assert {name: len(times) for name, times in found.items()} == {"a": 9, "b": 9, "c": 9}
    assert found["a"][0] == pytest.approx(0.01, rel=0.05)


def test_a_short_call_is_repeated_in_its_round(clock: PlannedClock) -> None:
    _, turns = planned(clock, 9.0, a=0.01)
    assert len(turns) == 1 + 9 * 5


def test_one_slow_call_does_not_use_up_the_budget_of_all(clock: PlannedClock) -> None:
    found, turns = planned(clock, 0.2, a=0.01, b=5.0)
    assert turns.count("b") == 2  # the first call, and one round
    assert (len(found["a"]), len(found["b"])) == (9, 1)


def test_three_rounds_are_done_beyond_the_budget(clock: PlannedClock) -> None:
    found, _ = planned(clock, 0.2, a=0.15)
    assert len(found["a"]) == 3


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Plan the seconds of a call, or the exception that it raises, by the name of its probe."""
    seconds: dict[str, Any] = {}

    def call(probe: Probe, device: torch.device) -> float:
        found = seconds.get(probe.name, 1e-4)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(_probes, "call_s", call)
    return seconds


def test_products_are_compared_with_those_of_fp32_in_the_same_rounds(taking: dict[str, Any]) -> None:
    taking["bf16 product"] = 2.5e-5
    notes: list[str] = []
    found = list(products(["fp32", "bf16"], [16, 32], CPU, notes))
    assert [(p.format, p.size) for p in found] == [("fp32", 16), ("bf16", 16), ("fp32", 32), ("bf16", 32)]
    assert found[0].speed is None
    assert found[3].speed is not None
    assert (found[3].speed.ratio, found[3].speed.num_repetitions) == (pytest.approx(4.0), 9)
    assert found[2].tflops == pytest.approx(2 * 32**3 / 1e-4 / 1e12)
    assert notes == []


def test_sizes_that_would_take_too_long_are_left_out(taking: dict[str, Any]) -> None:
    taking["fp16 product"] = 0.1
    found = list(products(["fp32", "fp16"], [16, 32, 64], CPU, []))
    assert [p.size for p in found if p.format == "fp16"] == [16]
    assert [p.size for p in found if p.format == "fp32"] == [16, 32, 64]


def test_a_product_that_fails_is_noted_and_the_others_go_on(taking: dict[str, Any]) -> None:
    taking.update(
        {"bf16 product": torch.OutOfMemoryError("CUDA out of memory"), "fp16 product": RuntimeError("no kernel")}
    )
    notes: list[str] = []
    found = list(products(["fp32", "bf16", "fp16"], [16, 32], CPU, notes))
    assert [(p.format, p.size) for p in found] == [("fp32", 16), ("fp32", 32)]
    assert notes == [
        "bf16 products of 16 were not measured: there was not enough memory",
        "fp16 products of 16 were not measured: RuntimeError: no kernel",
    ]


def test_fp32_is_measured_in_full() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert call_s(product("fp32", (32, 32, 32), CPU), CPU) > 0
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


# -- convolutions ------------------------------------------------------------------------------------------------------


def test_convolutions_are_measured_forward_and_backward(taking: dict[str, Any]) -> None:
    taking["fp16 backward"] = 1e-2
    found = list(convolutions(["fp32", "fp16"], [(1, 2, 4)], CPU, []))
    speeds = {(c.part, c.stride): c.speed for c in found}
    assert set(speeds) == {(part, stride) for part in ("forward", "backward") for stride in (1, 2)}
    assert speeds["backward", 1].ratio == pytest.approx(0.01)
    assert speeds["backward", 1].claim == "slower"
    assert speeds["forward", 2].claim == "same"


def test_a_format_whose_small_convolution_is_slow_meets_no_large_one(
    taking: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, tuple[int, int, int]]] = []
    real = _probes._Convolved.__init__

    def noted(self: Any, name: str, size: tuple[int, int, int], *rest: Any) -> None:
        made.append((name, size))
        real(self, name, size, *rest)

    monkeypatch.setattr(_probes._Convolved, "__init__", noted)
    taking["fp16 backward"] = 0.1
    small, large = (1, 2, 4), (4, 4, 8)
    found = list(convolutions(["fp32", "fp16"], [small, large], CPU, []))
    assert {size for name, size in made if name == "fp16"} == {small}
    assert {size for name, size in made if name == "fp32"} == {small, large}
    assert len([c for c in found if c.format == "fp16"]) == 4  # what the small one showed is kept


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_really_computed(stride: int) -> None:
    found = _probes._Convolved("bf16", (2, 3, 8), stride, CPU)
    with torch.no_grad():
        found.backward()
    assert found._made is not None
    images, weight = found._made
    assert images.grad is None
    assert weight.dtype is torch.bfloat16
    assert found._out is not None
    assert found._out.shape == (2, 3, 8 // stride, 8 // stride)
