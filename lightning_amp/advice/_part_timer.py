"""Measure how long each part of a training step takes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
from typing_extensions import final

from lightning_amp.measure import DeviceClock

DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
SCALING, CALLBACKS, REST = "checks, unscaling and clipping", "callbacks", "rest"


@final
class PartTimer:
    """Adds up the time of nested parts of a step. Time is counted for the innermost part only.

    The host's clock measures data loading and callbacks, and the device's clock all other parts.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._stack: list[tuple[str, str]] = []
        self._since: Any = None
        self._since_host = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._details: defaultdict[str, float] = defaultdict(float)
        self._laps: list[tuple[str, str, Any, Any]] = []

    @property
    def part(self) -> str:
        """Return the innermost part."""
        return self._stack[-1][0] if self._stack else REST

    def push(self, part: str, detail: str = "") -> None:
        """Begin a part inside the current one."""
        self._close()
        self._stack.append((part, detail))

    def pop(self) -> None:
        """End the innermost part."""
        self._close()
        if self._stack:
            self._stack.pop()

    def start(self) -> None:
        """Begin to count."""
        self._seconds.clear()
        self._details.clear()
        self._laps.clear()
        self._since, self._since_host = self._clock.now(), time.perf_counter()

    def stop(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds by part, and by detail. It waits for the device."""
        self._close()
        self._since = None
        for part, detail, first, last in self._laps:
            self._add(part, detail, self._clock.seconds(first, last))
        return dict(self._seconds), dict(self._details)

    def _close(self) -> None:
        if self._since is None:
            return
        now, host = self._clock.now(), time.perf_counter()
        part, detail = self._stack[-1] if self._stack else (REST, "")
        if part in (DATA, CALLBACKS):
            self._add(part, detail, host - self._since_host)
        else:
            self._laps.append((part, detail, self._since, now))
        self._since, self._since_host = now, host

    def _add(self, part: str, detail: str, seconds: float) -> None:
        self._seconds[part] += seconds
        if detail:
            self._details[detail] += seconds
