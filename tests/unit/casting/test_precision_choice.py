from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp.casting import Choice, _precision_choice, has_bf16_units
from lightning_amp.measure import SpeedComparison

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("choice", "spellings"),
    [
        (("bf16", "bf16-mixed", torch.bfloat16), ["bf16", "bfloat16", "torch.bfloat16"]),
        (("fp16", "16-mixed", torch.float16), ["fp16", 16, "16", "float16", "torch.float16"]),
        (("fp32", "32-true", torch.float32), ["fp32", 32, "32", "float32", "torch.float32"]),
    ],
)
def test_spellings(choice: tuple[str, str, torch.dtype], spellings: list[Any]) -> None:
    for spelling in (*spellings, *choice):
        assert Choice.of(_precision_choice.parse_precision(spelling)) == choice


@pytest.mark.parametrize("bad", ["16-true", "half", 64, True, None, [], torch.float64, 16.5])
def test_anything_else_lists_the_legal_values(bad: Any) -> None:
    names = "'auto', 'bf16', 'fp16', 'fp8', 'fp32' "
    also = r"bf16 is also 'bf16-mixed', .*torch.bfloat16; fp16: '16-mixed', .*16.*; fp32: '32-true', .*torch.float32\)"
    with pytest.raises(ValueError, match=rf"`precision` must be one of {names}.*{also}.*got"):
        _precision_choice.parse_precision(bad)


def test_fp8_is_bf16_but_for_products_in_training() -> None:
    choice = Choice.of(_precision_choice.parse_precision("fp8"))
    assert choice == ("fp8", "bf16-mixed", torch.bfloat16)
    assert choice.mixed


def test_fp8_evaluates_nothing() -> None:
    with pytest.raises(ValueError, match=r"`eval_precision='fp8'` is not supported.*evaluation runs in 'bf16'"):
        _precision_choice.parse_precision("fp8", "eval_precision")
    with pytest.raises(ValueError, match="must be one of 'auto', 'bf16', 'fp16', 'fp32' ") as caught:
        _precision_choice.parse_precision("half", "eval_precision")
    assert "fp8" not in str(caught.value)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_what_needs_blackwell_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"`precision='{name}'` is not supported: .* Blackwell .*Use precision 'fp8'"):
        _precision_choice.parse_precision(name)


def test_fp8_needs_hardware_or_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    device, fp8 = torch.device("cpu"), Choice.of("fp8")
    with pytest.raises(
        ValueError, match=r"cannot run precision 'fp8'. It can run: 'bf16', 'fp16', 'fp32'.*emulate=True"
    ):
        fp8.require(device)
    fp8.require(device, emulated=True)
    monkeypatch.setattr(_precision_choice, "has_fp8", lambda device: True)
    fp8.require(device)
    assert _precision_choice.runnable(device) == ["bf16", "fp16", "fp8", "fp32"]
    monkeypatch.setattr(_precision_choice, "_autocast_runs", lambda device, dtype: False)
    with pytest.raises(ValueError, match="It can run: 'fp32'"):
        fp8.require(device, emulated=True)


def test_a_device_that_cannot_is_told_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_precision_choice, "_autocast_runs", lambda device, dtype: dtype != torch.float16)
    with pytest.raises(ValueError, match="cannot run precision 'fp16'. It can run: 'bf16', 'fp32'"):
        Choice.of("fp16").require(torch.device("cpu"))


def test_the_cpu_runs_all() -> None:
    assert _precision_choice.runnable(torch.device("cpu")) == ["bf16", "fp16", "fp32"]


WITH_CONVOLUTION = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LazyConvTranspose1d(2, 2)))


def test_auto_on_a_cpu(machine: str) -> None:
    names, reasons = zip(*(Choice.pick(CPU, module) for module in (nn.Linear(2, 2), WITH_CONVOLUTION)), strict=True)
    expected = {"bf16-fast": "bf16", "bf16-slow": "fp32", "fp16-native": "bf16", "none": "fp32"}[machine]
    assert [choice.name for choice in names] == [expected] * 2
    products, both = {
        "bf16-fast": ("instructions; bf16 products run 10.0x as fast", "; bf16 convolutions run 3.00x as fast"),
        "bf16-slow": ("bf16 products run 1.79x as slow", "; bf16 convolutions run 5.0x as slow"),
        "fp16-native": ("instructions; bf16 products run 8.0x as f", "; bf16 convolutions run 2.50x as fast"),
        "none": ("this CPU has no bfloat16 instructions", ""),
    }[machine]
    assert all(products in why for why in reasons)
    assert [both in why for why in reasons] == [not both, True]


@pytest.mark.parametrize("speed", ["faster", "slower", "as fast", "noise", "busy", "unknown"])
def test_only_a_clear_loss_turns_bf16_off(speed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log_ratios = {
        "faster": [-0.7, -0.6, -0.8],
        "slower": [0.2, 0.21, 0.22],
        "as fast": [0.002, 0.001, 0.0005],  # its interval lies beyond 1, and it is the same within 5 %
        "noise": [0.9, 0.1, -0.4],
        "busy": [0.9, 2.0],
    }
    found = SpeedComparison.of(log_ratios[speed], 0.99) if speed in log_ratios else None
    monkeypatch.setattr(_precision_choice, "cpu_speed", lambda *_: found)
    monkeypatch.setattr(_precision_choice, "cpu_has", lambda name: ["avx512_bf16"])
    choice, why = Choice.pick(CPU)
    assert choice.name == ("fp32" if speed == "slower" else "bf16")
    said = {
        "faster": "; bf16 products run 2.0x as fast as fp32 (1.1 to 3.6) here",
        "slower": "bf16 products run 1.2x as slow as fp32 (1.2 to 1.3) here",
        "as fast": "; bf16 products compared with fp32 here: as fast within 5 %",
        "noise": "; bf16 products compared with fp32 here: speed undecided",
        "busy": "; too busy to measure bf16 products",
        "unknown": "instructions",
    }[speed]
    assert said in why


def test_slow_convolutions_matter_to_a_module_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"products": SpeedComparison(2.0, 1.9, 2.1, 15), "convolutions": SpeedComparison(0.2, 0.1, 0.3, 5)}
    monkeypatch.setattr(_precision_choice, "cpu_speed", lambda _, kind: speeds[kind])
    monkeypatch.setattr(_precision_choice, "cpu_has", lambda name: ["avx512_bf16"])
    assert Choice.pick(CPU, nn.Linear(2, 2))[0].name == "bf16"
    choice, why = Choice.pick(CPU, WITH_CONVOLUTION)
    assert (choice.name, why) == ("fp32", "bf16 convolutions run 5.0x as slow as fp32 (3.3 to 10.0) here")


def test_a_cpu_without_the_instructions_is_not_measured(
    on_machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine("none")
    monkeypatch.setattr(_precision_choice, "cpu_speed", lambda *_: pytest.fail("it was measured"))
    choice, why = Choice.pick(CPU, WITH_CONVOLUTION)
    assert (choice.name, why) == ("fp32", "this CPU has no bfloat16 instructions")


def test_the_real_machine_answers_too(on_machine: Callable[[str], None]) -> None:
    on_machine("real")
    choice, why = Choice.pick(CPU, WITH_CONVOLUTION)
    assert choice.name in ("bf16", "fp32")
    assert "CPU has no bfloat16" in why or "bf16 products" in why or "bf16 convolutions" in why


def test_the_device_that_is_given_is_asked_and_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (7, 5))
    assert [has_bf16_units(torch.device("cuda", index)) for index in (0, 1)] == [True, False]
