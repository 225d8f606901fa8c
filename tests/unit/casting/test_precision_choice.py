from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_amp.casting import Choice, _precision_choice


@pytest.mark.parametrize(
    ("spelling", "name", "canonical", "dtype"),
    [
        ("bf16", "bf16", "bf16-mixed", torch.bfloat16),
        ("bf16-mixed", "bf16", "bf16-mixed", torch.bfloat16),
        (torch.bfloat16, "bf16", "bf16-mixed", torch.bfloat16),
        ("fp16", "fp16", "16-mixed", torch.float16),
        ("16-mixed", "fp16", "16-mixed", torch.float16),
        (16, "fp16", "16-mixed", torch.float16),
        (torch.float16, "fp16", "16-mixed", torch.float16),
        ("fp32", "fp32", "32-true", torch.float32),
        ("32-true", "fp32", "32-true", torch.float32),
        (32, "fp32", "32-true", torch.float32),
        (torch.float32, "fp32", "32-true", torch.float32),
        *((text, "bf16", "bf16-mixed", torch.bfloat16) for text in ("bfloat16", "torch.bfloat16")),
        *((text, "fp16", "16-mixed", torch.float16) for text in ("16", "float16", "torch.float16")),
        *((text, "fp32", "32-true", torch.float32) for text in ("32", "float32", "torch.float32")),
    ],
)
def test_spellings(spelling: Any, name: str, canonical: str, dtype: torch.dtype) -> None:
    assert Choice.of(_precision_choice.parse_precision(spelling)) == (name, canonical, dtype)


@pytest.mark.parametrize("bad", ["16-true", "half", 64, True, None, [], torch.float64, 16.5])
def test_anything_else_lists_the_legal_values(bad: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`precision` must be one of 'auto', 'bf16', 'fp16', 'fp8', 'fp32'.*got"
    ) as caught:
        _precision_choice.parse_precision(bad)
    groups = (
        r"bf16 is also 'bf16-mixed', .*torch.bfloat16; fp16: '16-mixed', .*16.*; fp32: '32-true', .*torch.float32\)"
    )
    assert re.search(groups, str(caught.value))


def test_fp8_is_bf16_but_for_products_in_training() -> None:
    choice = Choice.of(_precision_choice.parse_precision("fp8"))
    assert choice == ("fp8", "bf16-mixed", torch.bfloat16)
    assert choice.mixed
    assert Choice.for_evaluation(None, choice, torch.device("cpu")) == Choice.of("bf16")
    assert Choice.for_evaluation("fp32", choice, torch.device("cpu")) == Choice.of("fp32")


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


@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp32")])
def test_auto_on_the_cpu(monkeypatch: pytest.MonkeyPatch, has_bf16: bool, name: str) -> None:
    monkeypatch.setattr(_precision_choice, "cpu_has", lambda name: has_bf16)
    picked, why = Choice.pick(torch.device("cpu"))
    assert picked.name == name
    assert "CPU" in why
