"""An examination that takes a second instead of a minute: what it measures is not looked at, but that it does."""

from __future__ import annotations

import pytest
import torch
from support import slow_projects

from lightning_amp.advice import Machine
from lightning_amp.profiling import _doctor, _examine_step, _machine, _variants, _watch


@pytest.fixture(scope="session")
def this_machine() -> Machine:
    return _machine.examine(torch.device("cpu"), short=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, this_machine: Machine) -> None:
    monkeypatch.setitem(slow_projects.SIZES, "divisor", 8)
    monkeypatch.setattr(_doctor, "examine", lambda device, short: this_machine)
    monkeypatch.setattr(_watch, "_TIMED", (3, 4))
    monkeypatch.setattr(_watch, "_TIMED_S", (0.0, 5.0))
    monkeypatch.setattr(_variants, "_ROUNDS", (1, 1))
    monkeypatch.setattr(_variants, "_LAPS", 1)
    monkeypatch.setattr(_examine_step, "joined", lambda batches, times: None)
