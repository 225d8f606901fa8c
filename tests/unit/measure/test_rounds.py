"""The timing of runs in rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_amp.measure import in_rounds


def runs(turns: list[str], **seconds: float) -> dict[str, Callable[[], float]]:
    def run(name: str) -> Callable[[], float]:
        return lambda: turns.append(name) or seconds[name] * len(turns)

    return {name: run(name) for name in seconds}


def test_each_round_reverses_the_order_and_the_first_calls_do_not_count() -> None:
    turns: list[str] = []
    found = in_rounds(runs(turns, a=1.0, b=10.0), lambda number: "ab" if number < 3 else ())
    assert "".join(turns) == "ab" + "ba" + "ab" + "ba"
    assert found == {"a": [4.0, 5.0, 8.0], "b": [30.0, 60.0, 70.0]}


def test_the_names_are_asked_for_before_each_round() -> None:
    turns: list[str] = []
    found = in_rounds(runs(turns, a=1.0, b=1.0), lambda number: ["ab", "a", "a", ""][number])
    assert "".join(turns) == "ab" + "ba" + "a" + "a"
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 1}


def test_a_run_that_fails_takes_part_in_no_round() -> None:
    def fails() -> float:
        raise RuntimeError("no kernel")

    told: list[str] = []
    both = {"a": fails, "b": lambda: 1.0}
    found = in_rounds(both, lambda n: "ab"[n:], lambda name, error: told.append(f"{name}: {error}"))
    assert (found, told) == ({"b": [1.0, 1.0]}, ["a: no kernel"])
    with pytest.raises(RuntimeError, match="no kernel"):
        in_rounds(both, lambda n: "ab"[n:])
