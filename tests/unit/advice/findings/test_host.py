"""Findings about the host: waits, callbacks, settings."""

from __future__ import annotations

from support.doctor_facts import machine, only, said, step

from lightning_amp.advice._record import Wait

PARTS = step().parts
GPU = machine(device_type="cuda")


def test_the_host_waits() -> None:
    facts = step(waits=(Wait("a.py:1", ".item()", 3), Wait("b.py:2", "nonzero", 1), Wait("log", "x", 9, by_user=False)))
    found = only(facts, GPU)
    assert (found.severity, found.code) == ("warning", "host-waits")
    assert "4 times in a step: .item() in a.py:1, and in 1 other place" in found.message
    on_cpu = only(facts)
    assert on_cpu.severity == "note"
    assert "On a CPU that is free" in on_cpu.message
    assert not said(step(waits=(Wait("log", "x", 9, by_user=False),)), GPU)


def test_a_slow_callback() -> None:
    found = only(step(parts={**PARTS, "callbacks": 0.1}, callbacks={"A": 0.001, "B": 0.099}))
    assert (found.severity, found.code) == ("warning", "slow-callback")
    assert "`B`: 99 ms" in found.message


def test_settings_that_cost_time() -> None:
    found = said(step(settings=("anomaly detection", "deterministic algorithms")))
    assert [(f.severity, f.code) for f in found] == [("warning", "anomaly-detection"), ("note", "deterministic")]
