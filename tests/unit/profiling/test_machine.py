"""What a machine can do."""

from __future__ import annotations

import pytest
import torch

from lightning_amp.profiling import _machine
from lightning_amp.profiling._machine import examine, matmul_s, support_of

CPU = torch.device("cpu")


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "_MOST_S", 0.01)
    found = examine(CPU, short=True)
    assert [f.name for f in found.formats] == ["fp32", "bf16", "fp16", "fp8"]
    assert {p.format for p in found.products} >= {"fp32", "bf16", "fp16"}
    assert all(p.tflops > 0 for p in found.products)
    assert found.versions["torch"] == torch.__version__
    assert found.memory_gib > 0
    assert found.precision in ("bf16", "fp32")
    fp8 = found.format("fp8")
    assert fp8 is not None
    assert (fp8.support, fp8.tflops) == ("missing", 0.0)
    assert found.gain("bf16") > 0
    assert found.format("int4") is None
    assert found.gain("int4") == 0


def test_products_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "matmul_s", lambda name, sizes, device: 1.0)
    assert [p.size for p in examine(CPU).products if p.format == "fp32"] == [128]


def test_what_does_not_fit_is_said_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, sizes: tuple[int, int, int], device: torch.device) -> float:
        if name == "bf16" and sizes[0] > 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if name == "fp16":
            raise RuntimeError("no kernel")
        return 1e-6

    monkeypatch.setattr(_machine, "matmul_s", fails)
    monkeypatch.setattr(_machine.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    found = examine(CPU)
    assert [p.size for p in found.products if p.format == "bf16"] == [128, 256]
    assert len([p for p in found.products if p.format == "fp32"]) == 5
    assert found.notes == (
        "bf16 products of 512 were not measured: there was not enough memory",
        "fp16 products of 128 were not measured: RuntimeError: no kernel",
    )


@pytest.mark.parametrize(
    ("name", "features", "support"),
    [("bf16", ["avx512_bf16"], "native"), ("bf16", [], "emulated"), ("fp16", [], "emulated"), ("fp8", [], "missing")],
)
def test_support_on_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str, features: list[str], support: str) -> None:
    monkeypatch.setattr(_machine, "cpu_has", lambda wanted: features)
    assert support_of(name, CPU)[0] == support


@pytest.mark.parametrize(
    ("capability", "native_bf16", "name", "support"),
    [
        ((7, 5), False, "bf16", "emulated"),  # a T4 says that it supports bf16
        ((7, 5), False, "fp16", "native"),
        ((6, 1), False, "fp16", "emulated"),
        ((9, 0), True, "bf16", "native"),
        ((9, 0), True, "fp8", "native"),
    ],
)
def test_support_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native_bf16: bool, name: str, support: str
) -> None:
    monkeypatch.setattr(_machine, "runnable", lambda device: ["bf16", "fp16", "fp8", "fp32"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native_bf16)
    assert support_of(name, torch.device("cuda", 0))[0] == support


def test_fp32_is_measured_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert matmul_s("fp32", (32, 32, 32), CPU, most_s=0.01) > 0
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_best_of_several_runs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 3.0, 3.0, 3.0, 4.0, 4.0, 9.0, 11.0, 20.0])
    monkeypatch.setattr(_machine.time, "perf_counter", lambda: next(moments))
    assert _machine.timed_s(lambda: None, CPU, most_s=10.0) == 1.0


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "matmul_s", lambda name, sizes, device: 1.0)
    monkeypatch.setattr(_machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(_machine.os, "getloadavg", lambda: (3.14, 0.0, 0.0))
    (note,) = examine(CPU).notes
    assert note == "the machine is busy (load 3.1 on 2 cores), so that all figures are noisy"
