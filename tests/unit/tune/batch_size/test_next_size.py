"""The choice of the next size, for memories of known shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from lightning_amp.tune.batch_size._next_size import MOST_RUNS, floor_size, largest_within, next_size
from lightning_amp.tune.batch_size._result import Measurement


def search(
    memory: Callable[[int], float], limit: float, first: int = 32, most: int | None = None
) -> tuple[int, list[int]]:
    """Return the size that the search finds, and all sizes that it ran."""
    points = [Measurement(first, memory(first), 1.0)]
    while len(points) < 20 and (size := next_size(points, limit, most)) is not None:
        assert size not in {p.batch_size for p in points}
        assert size >= 1
        assert most is None or size <= most
        points.append(Measurement(size, memory(size), 1.0))
    best = largest_within(points, limit)
    return (0 if best is None else best.batch_size), [p.batch_size for p in points]


@pytest.mark.parametrize("first", [1, 8, 32, 500, 5000])
@pytest.mark.parametrize("fixed", [0.0, 0.2, 0.9])
def test_a_straight_line(fixed: float, first: int) -> None:
    """Three runs, or some more from a size so small that most of the memory does not depend on it."""

    def memory(b: int) -> float:
        return fixed + 0.001 * b

    found, run = search(memory, 1.0, first)
    assert memory(found) <= 1.0
    assert memory(found + 8) > 1.0
    assert len(run) <= 5


def test_two_sizes_and_the_one_that_they_lead_to() -> None:
    assert search(lambda b: 0.2 + 0.001 * b, 1.0, first=100) == (800, [100, 328, 800])
    assert search(lambda b: 0.2 + 0.001 * b, 1.0, first=500) == (800, [500, 712, 800])


def test_where_memory_is_all_of_rows_the_second_is_the_last() -> None:
    assert search(lambda b: 0.001 * b, 1.0, first=32) == (1000, [32, 1000])


def test_a_far_guess_is_approached_in_steps() -> None:
    """The line through 32 and 88 rows may bend; a line through three sizes is trusted."""
    assert search(lambda b: 0.5 + 0.001 * b, 1.5, first=32) == (1000, [32, 88, 352, 1000])
    assert search(lambda b: 0.001 * b, 100.0, first=8) == (100_000, [8, 256, 1024, 32_768, 100_000])


def test_a_flat_line_is_not_trusted() -> None:
    """Up to some thousand rows the optimizer's state is the peak."""
    found, sizes = search(lambda b: max(0.5 + 1e-8 * b, 0.0004 * b), 1.0, first=8)
    assert found >= 2400
    assert max(sizes) < 4 * 2500


def test_the_first_size_is_near_the_limit() -> None:
    """The line needs another point from below."""
    assert search(lambda b: 0.5 + 0.001 * b, 1.5, first=1000) == (1000, [1000, 500])
    assert search(lambda b: 0.5 + 0.4 * b, 1.0, first=1) == (1, [1, 2])


FLAT_AT_FIRST = [partial(lambda kink, b: max(kink, 0.05 + 0.0005 * b), kink) for kink in (0.1, 0.3, 0.6)]
"""The optimizer's step needs more memory than small batches."""


@pytest.mark.parametrize(
    ("memory", "first", "factor"),
    [
        *((memory, first, 1.04) for memory in FLAT_AT_FIRST for first in (8, 32, 3000)),
        *((lambda b: 0.1 + 0.001 * b + 1e-6 * b * b, first, 1.05) for first in (2, 64, 900)),
    ],
)
def test_memory_that_bends_upwards(memory: Callable[[int], float], first: int, factor: float) -> None:
    found, run = search(memory, 1.0, first)
    assert memory(found) <= 1.0
    assert memory(math.ceil(found * factor) + 8) > 1.0
    assert len(run) <= MOST_RUNS
    assert max(map(memory, run)) <= max(2.0, memory(first))


@pytest.mark.parametrize("first", [8, 100, 4000])
def test_memory_that_runs_out(first: int) -> None:
    """A device that has less memory than it reports."""

    def memory(b: int) -> float:
        peak = 0.1 + 0.001 * b
        return peak if peak <= 0.8 else math.inf

    found, run = search(memory, 1.0, first)
    assert found <= 700
    assert found >= 600
    assert len(run) <= MOST_RUNS


@pytest.mark.parametrize(("most", "first"), [(50, 32), (50, 8), (50, 50), (100, 8), (71, 32)])
def test_the_rows_end_before_the_memory_does(most: int, first: int) -> None:
    found, run = search(lambda b: 0.1 + 0.001 * b, 1.0, first, most)
    assert found == most
    assert len(run) <= 3


def test_nothing_fits() -> None:
    found, run = search(lambda b: 2.0 + 0.1 * b, 1.0, first=64)
    assert found == 0
    assert run[-1] == 1
    assert len(run) <= 4


def test_one_row_fits() -> None:
    found, run = search(lambda b: 0.5 + 0.4 * b, 1.0, first=64)
    assert found == 1
    assert len(run) <= MOST_RUNS


def test_memory_without_rows_in_it_ends_with_the_rows_or_the_runs() -> None:
    assert search(lambda b: 0.3, 1.0, first=32, most=1000)[0] == 1000


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        (0.9, None, 0),
        (1.0, None, 1),
        (63.9, None, 63),
        (64.0, None, 64),
        (71.9, None, 64),
        (72.0 - 1e-12, None, 72),
        (71, 71, 71),
        (1e9, 71, 71),
        (math.inf, 71, 71),
        (70, 71, 64),
    ],
)
def test_rounding(size: float, most: int | None, expected: int) -> None:
    assert floor_size(size, most) == expected


def test_a_small_gain_is_not_worth_a_run() -> None:
    points = [Measurement(b, 0.0001 * b, 1.0) for b in (32, 4992, 9936)]
    assert next_size(points, 1.0) is None
    assert next_size(points[:2], 1.0) == 10_000
