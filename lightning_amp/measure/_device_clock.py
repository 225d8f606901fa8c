"""Measure time on a device: by timed events in its stream, or by the host's clock after waiting for the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import final


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
