"""The measurements of a machine, and the support that follows from them."""

from __future__ import annotations

import pytest
import torch

from lightning_amp.advice import _examine_machine, _probes
from lightning_amp.advice._examine_machine import examine, support_of

CPU = torch.device("cpu")
FEATURES = {"bf16": ["avx512_bf16"], "fp16": ["avx512_fp16"]}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Plan the seconds of a call by the name of its probe, such as `"bf16 backward"`; all others take 1 ms."""
    seconds: dict[str, float] = {}
    calls = 0

    def call_s(probe: _probes.Probe, device: torch.device) -> float:
        nonlocal calls
        calls += 1
        return seconds.get(probe.name, 1e-3) * (1 + 1e-3 * (calls % 3))

    monkeypatch.setattr(_probes, "call_s", call_s)
    monkeypatch.setattr(_examine_machine, "cpu_has", lambda name: FEATURES[name])
    monkeypatch.setattr(_examine_machine, "_SHORT_SIZES", {"other": (32,)})
    monkeypatch.setattr(_examine_machine, "_IMAGES", {"other": ((1, 2, 4),)})
    return seconds


def support() -> dict[str, tuple[str, str]]:
    return {found.name: (found.support, found.reason) for found in examine(CPU, short=True).formats}


@pytest.mark.slow
def test_this_machine() -> None:
    found = examine(CPU, short=True)
    assert [f.name for f in found.formats] == ["fp32", "bf16", "fp16", "fp8"]
    assert {p.format for p in found.products} >= {"fp32", "bf16", "fp16"}
    assert {(c.format, c.part, c.stride) for c in found.convolutions} == {
        (name, part, stride) for name in ("bf16", "fp16") for part in ("forward", "backward") for stride in (1, 2)
    }
    assert all(p.tflops > 0 for p in found.products)
    assert found.versions["torch"] == torch.__version__
    assert found.memory_gib > 0
    assert found.precision in ("bf16", "fp16", "fp32")
    fp8 = found.format("fp8")
    assert fp8 is not None
    assert (fp8.support, fp8.tflops) == ("missing", 0.0)
    assert found.speed("bf16") is not None
    assert found.format("int4") is None
    assert found.speed("int4") is None


def test_a_format_is_native_if_nothing_is_slower(planned: dict[str, float]) -> None:
    planned.update({"bf16 product": 2.5e-4, "fp16 product": 1e-3})
    found = support()
    assert found["bf16"] == ("native", "avx512_bf16")
    assert found["fp16"] == ("native", "avx512_fp16")


def test_a_format_is_partial_if_products_or_convolutions_are_slower(planned: dict[str, float]) -> None:
    planned.update({"bf16 product": 2.5e-4, "bf16 backward": 15e-3, "fp16 product": 2e-3, "fp16 backward": 0.1})
    found = support()
    assert found["bf16"] == ("partial", "avx512_bf16, but some 3x3 convolutions are slower than in fp32")
    assert found["fp16"] == (
        "partial", "avx512_fp16, but matrix products and some 3x3 convolutions are slower than in fp32"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "features", "support"),
    [("bf16", ["avx512_bf16"], "native"), ("bf16", [], "emulated"), ("fp16", [], "emulated"), ("fp8", [], "missing")],
)
def test_support_on_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str, features: list[str], support: str) -> None:
    monkeypatch.setattr(_examine_machine, "cpu_has", lambda wanted: features)
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
    monkeypatch.setattr(_examine_machine, "runnable", lambda device: ["bf16", "fp16", "fp8", "fp32"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert support_of(name, torch.device("cuda", 0))[0] == support


def test_a_busy_machine_is_reported(planned: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_examine_machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(_examine_machine.os, "getloadavg", lambda: (3.14, 0.0, 0.0))
    (note,) = examine(CPU, short=True).notes
    assert note == "the machine is busy (load 3.1 on 2 cores), so that all figures are noisy"
