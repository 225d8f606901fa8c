"""Replace the doctor's race and its clock by planned times, so that reports do not depend on the machine's load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_amp.advice._record import AS_IT_IS, Variant

ROUNDS = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0)
"""The factor of each round."""


class PlannedClock:
    """A substitute for the module `time`. Sleeping advances it, and reading it advances it a little."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        self.now_s += 1e-4
        return self.now_s


def planned_race(step_ms: Callable[[Any], Mapping[str, float]]) -> Callable[..., tuple[Variant, ...]]:
    """Return a substitute for `lightning_amp.advice._examine_step.race`, which runs every step once.

    `step_ms` gets the data module and returns milliseconds by label. Labels that it leaves out have no result.
    """

    def race(contestants: Sequence[Any], track: Any, **_: Any) -> tuple[Variant, ...]:
        for contestant in contestants:
            contestant.round(track, 1)
        ran = [contestant.result() for contestant in contestants]
        assert [variant.error for variant in ran if variant.error or len(variant.step_s) != 1] == []
        planned = step_ms(track.data_module)
        return tuple(
            Variant(v.label, tuple(planned[v.label] * share / 1e3 for share in _rounds(v.label)))
            for v in ran
            if v.label in planned
        )

    return race


def _rounds(label: str) -> tuple[float, ...]:
    return ROUNDS if label == AS_IT_IS else ROUNDS[::-1]
