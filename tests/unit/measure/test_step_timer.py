"""Marks in time on any device, and the times of training steps, with a clock that only the tests move."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from lightning_amp.measure import DeviceClock, StepTimer, _step_timer

# -- marks -------------------------------------------------------------------------------------------------------------


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


# -- steps -------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def run(watch: StepTimer, clock: Any, *seconds: float, num_samples: int | None = 8, watched: bool = False) -> None:
    for duration in seconds:
        clock.now += duration
        watch.lap(num_samples, watched=watched)


def started(clock: Clock) -> StepTimer:
    watch = StepTimer(torch.device("cpu"))
    clock.now += 50.0  # before training
    watch.resume()
    return watch


def test_from_the_end_of_a_batch_to_the_end_of_the_next(clock: Clock) -> None:
    """Data loading counts, because each step has to wait for it."""
    watch = started(clock)
    run(watch, clock, 5.0, 1.0, 2.0, 3.0)
    watch.pause()
    assert watch.num_laps == 4
    assert watch.steady() == [1, 2, 3]
    assert watch.step_s() == [1.0, 2.0, 3.0]
    assert watch.samples_per_s() == [8.0, 4.0, pytest.approx(8 / 3)]
    assert watch.elapsed_s() == [0.0, 5.0, 6.0, 8.0, 11.0]


@pytest.mark.parametrize(("num_steps", "num_first"), [(4, 1), (5, 1), (12, 2), (49, 9), (50, 10), (500, 10)])
def test_the_first_steps_are_not_steady(clock: Clock, num_steps: int, num_first: int) -> None:
    watch = started(clock)
    run(watch, clock, *[1.0] * num_steps)
    watch.pause()
    assert watch.steady() == list(range(num_first, num_steps))


def test_the_first_step_after_a_pause_is_not_steady(clock: Clock) -> None:
    watch = started(clock)
    run(watch, clock, 1.0, 1.0, 1.0)
    watch.pause()
    clock.now += 1000.0  # a validation
    watch.resume()
    run(watch, clock, 9.0, 1.0)
    watch.pause()
    assert watch.steady() == [1, 2, 4]
    assert watch.step_s() == [1.0] * 3
    assert watch.elapsed_s() == [0.0, 1.0, 2.0, 3.0, 12.0, 13.0]


def test_a_watched_step_counts_as_a_usual_one(clock: Clock) -> None:
    """A watched step is not steady, and it adds the time of a usual step to the time of training."""
    watch = started(clock)
    run(watch, clock, 9.0)
    run(watch, clock, 70.0, 80.0, watched=True)
    run(watch, clock, 2.0, 4.0)
    run(watch, clock, 0.5, watched=True)  # less than usual
    watch.pause()
    assert watch.steady() == [3, 4]
    assert watch.elapsed_s() == [0.0, 9.0, 12.0, 15.0, 17.0, 21.0, 21.5]


def test_batches_whose_size_is_unknown(clock: Clock) -> None:
    watch = started(clock)
    run(watch, clock, 1.0, 2.0)
    run(watch, clock, 4.0, num_samples=None)
    run(watch, clock, 0.0)  # a clock that stands still
    run(watch, clock, 2.0, num_samples=0)
    watch.pause()
    assert watch.step_s() == [2.0, 4.0, 0.0, 2.0]
    assert watch.samples_per_s() == [4.0, 0.0]


class Marks:
    """The clock of a device: reading a time waits for the device."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.waits = clock, 0

    def now(self) -> list[float]:
        return [self.clock.now]

    def seconds(self, first: list[float], last: list[float]) -> float:
        self.waits += 1
        return last[0] - first[0]


def test_only_a_pause_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks(clock)
    monkeypatch.setattr(_step_timer, "DeviceClock", lambda device: marks)
    watch = StepTimer(torch.device("cuda", 1))
    watch.resume()
    run(watch, clock, 5.0, 1.0, 2.0)
    assert (watch.num_laps, marks.waits) == (3, 0)
    watch.pause()
    assert marks.waits == 3
    clock.now += 1000.0
    watch.resume()
    run(watch, clock, 9.0, 4.0)
    watch.pause()
    watch.pause()
    assert marks.waits == 5
    assert watch.steady() == [1, 2, 4]
    assert watch.step_s() == pytest.approx([1.0, 2.0, 4.0])
    assert watch.elapsed_s() == pytest.approx([0.0, 5.0, 6.0, 8.0, 17.0, 21.0])
