from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import pytest
import torch

from lightning_amp.casting import _cpu_speed
from lightning_amp.casting._cpu_speed import compare_runs, measure_cpu_speed


class Clock:
    """Shows a time that only the fake runs move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def run(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        """Return a run that takes as long as `seconds` says."""

        def run() -> None:
            self.order.append(name)
            self.now += seconds()

        return run


def test_a_run_that_takes_twice_as_long_is_slower() -> None:
    clock, noise = Clock(), random.Random(0)
    half = clock.run("half", lambda: 2e-3 * noise.lognormvariate(0, 0.1))
    full = clock.run("full", lambda: 1e-3 * noise.lognormvariate(0, 0.1))
    speed = compare_runs(half, full, most_s=0.1, clock=clock)
    assert speed is not None
    assert speed.claim == "slower"
    assert speed.ratio == pytest.approx(0.5, rel=0.1)
    assert clock.order[:6] == ["half", "full", "full", "half", "half", "full"]  # the first two warm up


def test_noise_alone_hardly_ever_decides() -> None:
    noise = random.Random(1)
    claims = 0
    for _ in range(400):
        clock = Clock()
        runs = [clock.run(name, lambda: 3e-3 * noise.lognormvariate(0, 0.2)) for name in ("half", "full")]
        speed = compare_runs(runs[0], runs[1], most_s=0.1, clock=clock)
        claims += speed is not None and speed.claim == "slower"
    assert claims <= 6  # 0.5 % are allowed: 2 of 400


def test_the_budget_ends_the_probe() -> None:
    clock = Clock()
    half, full = clock.run("half", lambda: 0.03), clock.run("full", lambda: 0.01)
    speed = compare_runs(half, full, most_s=0.1, clock=clock)
    assert speed is not None
    assert speed.num_repetitions == 2  # the warm-up counts
    assert clock.now <= 0.1 + 0.04


def test_one_round_claims_nothing() -> None:
    clock = Clock()
    speed = compare_runs(clock.run("half", lambda: 9.0), clock.run("full", lambda: 1.0), most_s=0.1, clock=clock)
    assert speed is not None
    assert speed.claim == "one run"


@pytest.mark.parametrize("step", [0.0, -1e-3, float("nan")], ids=["stands still", "goes back", "is broken"])
def test_a_strange_clock_ends_too_and_tells_nothing(step: float) -> None:
    clock = Clock()
    half, full = clock.run("half", lambda: step), clock.run("full", lambda: step)
    assert compare_runs(half, full, most_s=0.1, clock=clock) is None
    assert len(clock.order) <= 2 * 26


@pytest.mark.parametrize("kind", ["products", "convolutions"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_both_formats_compute_and_nothing_else_changes(
    precision: Literal["bf16", "fp16"], kind: Literal["products", "convolutions"]
) -> None:
    torch.set_default_dtype(torch.float64)
    before = torch.get_rng_state()
    ticks = iter(range(1000))
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            speed = measure_cpu_speed(precision, kind, clock=lambda: 1e-3 * next(ticks))
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert speed is not None
    assert speed.claim == "same"  # each reading of this clock is a millisecond after the last
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1


def test_a_kind_is_measured_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(_cpu_speed, "measure_cpu_speed", lambda *what: calls.append(what))
    _cpu_speed.cpu_speed.cache_clear()
    for kind in ("products", "convolutions", "products"):
        _cpu_speed.cpu_speed("bf16", kind)
    _cpu_speed.cpu_speed.cache_clear()
    assert calls == [("bf16", "products"), ("bf16", "convolutions")]
