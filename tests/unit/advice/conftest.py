"""An examination that takes a second instead of a minute, on an injected machine: its times are not looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.doctor_facts import machine
from zoo import slow

from lightning_amp.advice import _doctor, _examine_step, _race, _watch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, on_machine: Callable[[str], None]) -> None:
    """On a machine on which bf16 pays, whatever this CPU is: what is healthy there is not healthy everywhere."""
    on_machine("bf16-fast")
    monkeypatch.setitem(slow.SIZES, "divisor", 8)
    monkeypatch.setattr(_doctor, "examine", lambda device, short: machine())
    monkeypatch.setattr(_watch, "_TIMED", (3, 4))
    monkeypatch.setattr(_watch, "_TIMED_S", (0.0, 5.0))
    monkeypatch.setattr(_race, "_ROUNDS", (1, 1, 1))
    monkeypatch.setattr(_race, "_LAPS", 1)
    monkeypatch.setattr(_examine_step, "joined", lambda batches, times: None)
