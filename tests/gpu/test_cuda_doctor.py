"""`doctor` on a GPU: the formats it finds, waits of the host, and the device's time and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo.slow import HEALTHY, Language, Project, Waiting, depthwise, mlp, rows, tokens

from lightning_amp import doctor
from lightning_amp.advice._machine import examine
from lightning_amp.advice._step import BACKWARD, FORWARD
from lightning_amp.advice._watch import PartTimer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def codes(*args: Any, **kwargs: Any) -> dict[str, str]:
    return {finding.code: finding.severity for finding in doctor(*args, precision="bf16", **kwargs).findings}


@pytest.mark.needs("speed")
def test_the_machine() -> None:
    found = examine(torch.device("cuda", 0))
    major = torch.cuda.get_device_capability()[0]
    support = {f.name: f.support for f in found.formats}
    assert support["bf16"] in (("native",) if major >= 8 else ("emulated",))
    assert ("tf32" in support) == (major >= 8)
    assert support["fp8"] in (("native",) if torch.cuda.get_device_capability() >= (8, 9) else ("missing",))
    assert all(p.tflops > 0 for p in found.products)
    if major >= 8:
        speed = found.speed("bf16")
        assert speed is not None
        assert speed.ratio > 1.5
    assert found.memory_gib > 1
    assert found.tf32 is not None or major < 8


@pytest.mark.needs("speed")
def test_fp32_products_are_measured_without_tf32() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        found = examine(torch.device("cuda", 0), short=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    if found.format("tf32") is not None:
        assert found.best_tflops("tf32") > 1.3 * found.best_tflops("fp32")
    assert found.tf32 is not False


def test_the_clock_never_waits() -> None:
    clock = PartTimer(torch.device("cuda", 0))
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clock.start()
        for part in (FORWARD, BACKWARD):
            clock.push(part)
            torch.mm(torch.ones(1000, 1000, device="cuda"), torch.ones(1000, 1000, device="cuda"))
            clock.pop()
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    parts = clock.stop()
    assert parts[FORWARD] > 0
    assert parts[BACKWARD] > 0


@pytest.mark.needs("speed")
def test_reading_a_loss_is_a_wait() -> None:
    report = doctor(lambda: Waiting("item"), rows(256, 512), precision="bf16")
    (finding,) = (f for f in report.findings if f.code == "host-waits")
    assert "loss.item()" in finding.message
    assert "host-waits" not in codes(lambda: Waiting("keep"), rows(256, 512))
    assert codes(lambda: Waiting("mask"), rows(256, 512))["host-waits"] == "warning"


@pytest.mark.needs("speed")
def test_memory_is_near_that_of_the_device() -> None:
    report = doctor(lambda: Language(32_000), tokens(16, 256, 32_000), precision="bf16")
    assert report.step is not None
    assert report.step.memory.logits > 0.5 * report.step.memory.peak
    assert "large-logits" in [finding.code for finding in report.findings]
    torch.cuda.reset_peak_memory_stats()
    doctor(lambda: Language(32_000), tokens(16, 256, 32_000), precision="bf16")
    assert report.step.memory.peak < 1.1 * torch.cuda.max_memory_allocated()


@pytest.mark.needs("speed")
def test_parts_of_a_step_add_up() -> None:
    report = doctor(lambda: Project(mlp(4096, 6)), rows(4096, 512), precision="bf16")
    assert report.step is not None
    parts = report.step.parts
    assert parts[FORWARD] > 0
    assert parts[BACKWARD] > parts[FORWARD] / 2
    as_it_is = report.step.variant("as it is")
    assert as_it_is is not None
    assert 0.3 < sum(parts.values()) / min(as_it_is.step_s) < 3
    assert report.step.recorded.product_s > 0


@pytest.mark.needs("speed")
@pytest.mark.parametrize("name", ["a perceptron", "a transformer", "an LSTM", "convolutions, channels last"])
def test_a_step_of_anything_is_recorded(name: str) -> None:
    case = HEALTHY[name]
    report = doctor(case.make, case.data, precision="fp16")
    assert report.step is not None
    assert report.step.recorded.flops["float16"] > 0


@pytest.mark.needs("speed")
def test_channels_first_is_seen() -> None:
    assert "channels-last" in codes(lambda: Project(depthwise()), rows(64, 3, 64, 64))


@pytest.mark.needs("speed")
def test_the_device_is_left_empty() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    doctor(lambda: Project(mlp()), rows(256, 512), precision="bf16")
    assert torch.cuda.memory_allocated() <= before + 2**20
