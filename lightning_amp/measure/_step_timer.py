"""Measure time on a device, and how long training steps take.

A device with timed events in its stream is not waited for. For others the host's clock is read after waiting.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Iterable
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from typing_extensions import final

_FIRST = 10
"""Steps that are not steady, because they allocate memory, choose kernels and compile code.

In short runs, a fifth of the steps counts as not steady.
"""


@final
class DeviceClock:
    """Measure time on the CPU or on one device, which need not be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._where = device
        self._has_events = _has_timed_events(device)

    def now(self) -> Any:
        """Return a mark behind everything launched so far. It waits for a device that has no timed events."""
        if self._has_events:
            return _event(self._where)
        if self._where.type != "cpu":
            torch.accelerator.synchronize(self._where)
        return time.perf_counter()

    @staticmethod
    def seconds(first: Any, last: Any) -> float:
        """Return the seconds between two marks of one clock. It waits until the device has reached `last`."""
        if isinstance(last, float):
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call. It waits until the device has finished the call."""
        start = self.now()
        run()
        return self.seconds(start, self.now())


@functools.cache
def _has_timed_events(device: torch.device) -> bool:
    if device.type in ("cpu", "mps"):  # events of MPS may hang: https://github.com/pytorch/pytorch/issues/162872
        return False
    try:
        return DeviceClock.seconds(_event(device), _event(device)) >= 0
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def _event(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


@final
class StepTimer:
    """Measure the time from the end of one training batch to the end of the next, data loading included.

    To leave out the loading, call :meth:`resume` when a batch begins. On a device with timed events, steps do not wait,
    but :meth:`pause` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._previous: Any = None  # a mark
        self._open: list[tuple[Any, Any]] = []
        self._seconds = array("d")
        self._samples = array("q")
        self._uneven: set[int] = set()
        self._watched: set[int] = set()

    @property
    def num_laps(self) -> int:
        """Return the number of finished steps."""
        return len(self._samples)

    def resume(self) -> None:
        """Begin, or go on after a pause."""
        self._previous = self._clock.now()
        self._uneven.add(self.num_laps)

    def pause(self) -> None:
        """Stop until :meth:`resume`. It waits for the device."""
        self._previous = None
        self._seconds.extend(self._clock.seconds(*lap) for lap in self._open)
        self._open.clear()

    def lap(self, num_samples: int | None = None, *, watched: bool = False) -> None:
        """End a training step.

        Args:
            num_samples: Size of its batch, if known.
            watched: Whether another measurement slowed the step down.

        """
        now = self._clock.now()
        assert self._previous is not None, "`resume` was not called"
        self._open.append((self._previous, now))
        if watched:
            self._watched.add(self.num_laps)
        self._samples.append(-1 if num_samples is None else num_samples)
        self._previous = now

    def steady(self) -> list[int]:
        """Return the steady steps: without the first steps, the first step after each pause, and watched steps."""
        first, uneven = min(_FIRST, self.num_laps // 5), self._uneven | self._watched
        return [lap for lap in range(first, len(self._seconds)) if lap not in uneven]

    def step_s(self, steps: Iterable[int] | None = None) -> list[float]:
        """Return the seconds of these steps, by default of all steady steps. Call it after :meth:`pause`."""
        return [self._seconds[lap] for lap in (self.steady() if steps is None else steps)]

    def samples_per_s(self, steps: Iterable[int] | None = None) -> list[float]:
        """Return the samples per second of these steps, by default of all steady steps, where batch sizes are known."""
        laps = self.steady() if steps is None else steps
        known = [lap for lap in laps if self._samples[lap] >= 0 and self._seconds[lap] > 0]
        return [self._samples[lap] / self._seconds[lap] for lap in known]

    def elapsed_s(self) -> list[float]:
        """Return the seconds of training after 0, 1, 2, ... steps.

        A watched step counts with the time of a usual step.
        """
        times = self.step_s() or [s for lap, s in enumerate(self._seconds) if lap not in self._watched]
        usual = median(times) if times else 0.0
        laps = (min(s, usual) if lap in self._watched else s for lap, s in enumerate(self._seconds))
        return [0.0, *accumulate(laps)]
