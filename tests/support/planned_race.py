"""A race with planned times, and a planned clock, so that no test depends on the speed of the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_amp.advice._step import AS_IT_IS, Variant

ROUNDS = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0)
"""Each round takes this many times the planned time."""


class PlannedClock:
    """Stand in for the module `time`: sleeping advances the clock, and reading it advances it by 0.1 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        self.now_s += 1e-4
        return self.now_s


def planned_race(step_ms: Callable[[Any], Mapping[str, float]]) -> Callable[..., tuple[Variant, ...]]:
    """Return a replacement for `lightning_amp.advice._doctor.race` that runs every variant once.

    `step_ms` returns milliseconds by label, given the data module. Other labels are left out of the result.
    """

    def race(contestants: Sequence[Any], track: Any, **_: Any) -> tuple[Variant, ...]:
        for contestant in contestants:
            contestant.round(track, 1)
        ran = [contestant.result() for contestant in contestants]
        assert [variant.error for variant in ran if variant.error or len(variant.step_s) != 1] == []
        planned, rounds = step_ms(track.data_module), {AS_IT_IS: ROUNDS}
        return tuple(
            Variant(v.label, tuple(planned[v.label] * share / 1e3 for share in rounds.get(v.label, ROUNDS[::-1])))
            for v in ran
            if v.label in planned
        )

    return race
