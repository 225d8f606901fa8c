"""Facts of a machine."""

from __future__ import annotations

from support.doctor_facts import machine

from lightning_amp.advice import Format


def test_formats_by_name() -> None:
    found = machine()
    bf16 = found.format("bf16")
    assert bf16 is not None
    assert bf16.fills_at == 512
    assert found.format("fp4") is None


def test_the_gain_is_against_fp32() -> None:
    assert machine().gain("bf16") == 4.0
    assert machine().gain("fp4") == 0.0
    assert machine(formats=(Format("fp32", "native", ""), Format("bf16", "native", "", 4.0))).gain("bf16") == 0.0
