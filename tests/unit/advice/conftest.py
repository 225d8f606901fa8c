"""A fixture that shortens an examination from a minute to a second; its times mean nothing then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.doctor_facts import machine
from zoo import slow

from lightning_amp.advice import _doctor, _race, _watch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, on_machine: Callable[[str], None]) -> None:
    """Pretend a machine on which bf16 is faster, because a healthy project needs one."""
    on_machine("bf16-fast")
    monkeypatch.setitem(slow.SIZES, "divisor", 8)
    monkeypatch.setattr(_doctor, "examine", lambda device, short: machine())
    monkeypatch.setattr(_watch, "_TIMED", (3, 4))
    monkeypatch.setattr(_watch, "_TIMED_S", (0.0, 5.0))
    monkeypatch.setattr(_race, "_ROUNDS", (1, 1, 1))
    monkeypatch.setattr(_race, "_LAPS", 1)
