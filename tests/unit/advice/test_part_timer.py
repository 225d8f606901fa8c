"""The time of nested parts of a step."""

from __future__ import annotations

import pytest
import torch

from lightning_amp.advice import _part_timer
from lightning_amp.advice._part_timer import BACKWARD, CALLBACKS, FORWARD, REST, PartTimer


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [0.0]
    monkeypatch.setattr(_part_timer.time, "perf_counter", lambda: moment[0])
    return moment


def test_each_moment_counts_for_the_innermost_part(now: list[float]) -> None:
    clock = PartTimer(torch.device("cpu"))
    clock.push("before it started")
    now[0] = 5.0
    clock.pop()
    clock.start()
    for part, seconds in ((FORWARD, 1.0), (BACKWARD, 2.0)):
        clock.push(part)
        assert clock.part == part
        now[0] += seconds
    clock.pop()
    now[0] += 4.0
    clock.pop()
    assert clock.part == REST
    now[0] += 8.0
    clock.push(CALLBACKS, "Mine")
    now[0] += 16.0
    clock.pop()
    parts, details = clock.stop()
    assert parts == {FORWARD: 5.0, BACKWARD: 2.0, REST: 8.0, CALLBACKS: 16.0}
    assert details == {"Mine": 16.0}


def test_a_second_start_begins_anew(now: list[float]) -> None:
    clock = PartTimer(torch.device("cpu"))
    clock.start()
    now[0] = 1.0
    clock.stop()
    clock.start()
    now[0] = 3.0
    assert clock.stop() == ({REST: 2.0}, {})
