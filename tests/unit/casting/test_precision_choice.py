from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_amp import AmpPrecision
from lightning_amp.casting import Choice, _precision_choice, has_bf16_units

CPU = torch.device("cpu")


class StrMember(str, Enum):
    """Its members are strings, but `str` gives their names."""


@pytest.mark.parametrize(
    ("choice", "spellings"),
    [
        (("bf16", "bf16-mixed", torch.bfloat16), ["bf16", "bfloat16", "torch.bfloat16"]),
        (("fp16", "16-mixed", torch.float16), ["fp16", 16, "16", "float16", "torch.float16"]),
        (("fp32", "32-true", torch.float32), ["fp32", 32, "32", "float32", "torch.float32"]),
    ],
)
def test_spellings(choice: tuple[str, str, torch.dtype], spellings: list[Any]) -> None:
    member = StrMember("StrMember", {"one": spellings[0]})["one"]
    for spelling in (*spellings, *choice, member):
        assert Choice.of(_precision_choice.parse_precision(spelling)) == choice


@pytest.mark.parametrize(
    ("bad", "meant"),
    [
        *{"half": "fp16", "fp17": "fp16", "BF-16": "bf16", torch.float64: "fp32", torch.float8_e5m2: "fp8"}.items(),
        *(("16-true", r"`Trainer\(precision='16-true'\)`.* 'fp16' keeps"), ("bf16-true", "'bf16' keeps"), (64, "fp32")),
        ("fp16-mixed", "fp16"),
        *((bad, "") for bad in (48, True, None, [], 16.5, "nonsense")),
    ],
)
def test_anything_else_lists_the_legal_values_and_the_closest(bad: Any, meant: str) -> None:
    end = meant if "keeps" in meant else rf" Did you mean '{meant}'\?$" if meant else "$"
    names = "'auto', 'bf16', 'fp16', 'fp8', 'fp32', 'bf16-mixed', torch.bfloat16, '16-mixed', 16, .*torch.float32"
    with pytest.raises(ValueError, match=f"`precision` must be one of {names}; got .*{end}"):
        _precision_choice.parse_precision(bad)


def test_fp8_is_bf16_but_for_products_in_training() -> None:
    choice = Choice.of(_precision_choice.parse_precision("fp8"))
    assert choice == ("fp8", "bf16-mixed", torch.bfloat16)
    assert choice.mixed


def test_fp8_evaluates_nothing() -> None:
    with pytest.raises(ValueError, match=r"`eval_precision='fp8'` is not supported.*evaluation runs in 'bf16'"):
        AmpPrecision(eval_precision="fp8")
    with pytest.raises(ValueError, match="must be one of 'auto', 'bf16', 'fp16', 'fp32', ") as caught:
        AmpPrecision(eval_precision="half")
    assert "fp8" not in str(caught.value)


def test_fp8_needs_hardware_or_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    device, fp8 = torch.device("cpu"), Choice.of("fp8")
    with pytest.raises(
        ValueError, match=r"cannot run precision 'fp8'. It can run: 'bf16', 'fp16', 'fp32'.*emulate=True"
    ):
        fp8.require(device)
    fp8.require(device, emulated=True)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="install torchao, which is missing, and pass"):
        patch.setattr("importlib.util.find_spec", lambda name: None)
        fp8.require(device)
    monkeypatch.setattr(_precision_choice, "has_fp8", lambda device: True)
    fp8.require(device)
    assert _precision_choice.runnable(device) == ["bf16", "fp16", "fp8", "fp32"]
    monkeypatch.setattr(_precision_choice, "_autocast_runs", lambda device, dtype: False)
    with pytest.raises(ValueError, match="It can run: 'fp32'"):
        fp8.require(device, emulated=True)


def test_auto_on_a_cpu(machine: str) -> None:
    choice, why = Choice.pick(CPU)
    name, fact = {
        "bf16-fast": ("bf16", "this CPU has bfloat16 instructions: avx512_bf16, amx_bf16"),
        "bf16-slow": ("fp32", "this CPU has avx512_bf16 but no amx_bf16, and is not AMD's"),
        "fp16-native": ("bf16", "amx_bf16"),
        "amd": ("bf16", "this CPU has bfloat16 instructions: avx512_bf16"),
        "arm": ("bf16", "this CPU has bfloat16 instructions: bf16"),
        "none": ("fp32", "this CPU has no bfloat16 instructions"),
    }[machine]
    assert choice.name == name
    assert fact in why


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "is_amds"),
    [
        ("vendor_id\t: AuthenticAMD", "", True),
        ("vendor_id\t: GenuineIntel", "AuthenticAMD", False),
        (None, "AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", True),
        (None, "Intel64 Family 6 Model 106 Stepping 6, GenuineIntel", False),
        (None, "", False),
    ],
)
def test_the_vendor(
    cpuinfo: str | None, processor: str, is_amds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_machine: Any
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    on_machine("real")
    monkeypatch.setattr(_precision_choice, "Path", lambda _: file)
    monkeypatch.setattr("platform.processor", lambda: processor)
    assert _precision_choice.is_amd() is is_amds


def test_the_device_that_is_given_is_asked_and_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (7, 5))
    assert [has_bf16_units(torch.device("cuda", index)) for index in (0, 1)] == [True, False]
