"""Marks in time on any device: their distance, their device, and whether they wait."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_amp.measure import DeviceClock, _step_timer


def last(device: torch.device) -> torch.device:
    """Return the last device of this type. If there are several, it is not the current one."""
    return device if device.type == "cpu" else torch.device(device.type, torch.accelerator.device_count() - 1)


def current(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.current_device_index()


def test_seconds_between_two_marks(device: torch.device) -> None:
    place = last(device)
    clock, before = DeviceClock(place), current(device)
    first = clock.now()
    time.sleep(0.01)
    torch.ones(8, 8, device=place).sum()
    second = clock.now()
    assert 0.009 < clock.seconds(first, second) < 1.0
    assert current(device) == before
    assert isinstance(first, float) if device.type == "cpu" else first.device == place


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", devices.append)
    _step_timer._has_timed_events.cache_clear()
    return devices


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_without_timed_events_each_mark_waits(
    synchronized: list[torch.device], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error("Backend doesn't support events.")

    monkeypatch.setattr(torch, "Event", fail)
    xpu = torch.device("xpu", 1)
    clock = DeviceClock(xpu)
    first, second = clock.now(), clock.now()
    assert synchronized == [xpu, xpu]
    assert 0.0 <= clock.seconds(first, second) < 1.0


def test_events_of_mps_are_not_used(synchronized: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for them may hang."""
    monkeypatch.delattr(torch, "Event")
    mps = torch.device("mps", 0)
    DeviceClock(mps).now()
    assert synchronized == [mps]


def test_a_mark_waits_for_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DeviceClock(device)
    monkeypatch.delattr(torch.accelerator, "synchronize")
    clock.now()
