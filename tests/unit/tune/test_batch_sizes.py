"""The choice of the next size for memories of known shapes, the learning rate, and the results as text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lightning_amp.tune import BatchSizeResult, BatchSizes, Measurement
from lightning_amp.tune._batch_sizes import MOST_RUNS, largest_within, next_size, suggested_rate


def search(
    memory: Callable[[int], float], limit: float, first: int = 32, most: float = math.inf
) -> tuple[int, list[int]]:
    """Return the size that the search finds, and all sizes that it ran."""
    points = [Measurement(first, memory(first), 1.0)]
    while len(points) < 20 and (size := next_size(points, limit, most)) is not None:
        assert size not in {p.batch_size for p in points}
        assert size >= 1
        assert size <= most
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
    assert len(run) <= 6


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
    assert max(map(memory, run)) <= max(2.2, memory(first))


@pytest.mark.parametrize("first", [8, 100, 4000])
def test_memory_that_runs_out(first: int) -> None:
    """A device that has less memory than it reports."""

    def memory(b: int) -> float:
        peak = 0.1 + 0.001 * b
        return peak if peak <= 0.8 else math.inf

    found, run = search(memory, 1.0, first)
    assert 600 <= found <= 700
    assert len(run) <= MOST_RUNS


@pytest.mark.parametrize(("most", "first"), [(50, 32), (50, 8), (50, 50), (100, 8), (71, 32)])
def test_the_rows_end_before_the_memory_does(most: int, first: int) -> None:
    found, run = search(lambda b: 0.1 + 0.001 * b, 1.0, first, most)
    assert found == most
    assert len(run) <= 4


def test_sizes_are_multiples_of_eight_from_64_on() -> None:
    assert search(lambda b: 0.001 * b, 0.0715)[0] == 64
    assert search(lambda b: 0.001 * b, 0.0635)[0] == 63
    assert search(lambda b: 0.001 * b, 1.0, most=71)[0] == 71


# -- the learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "expected", "rule"),
    [
        ("SGD", 0.4, "linear rule for SGD"),
        ("AdamW8bit", 0.2, "square root rule for AdamW8bit"),
        ("LAMB", 0.2, "square root"),
        ("LARS", 0.4, "linear"),
    ],
)
def test_rules(optimizer: str, expected: float, rule: str) -> None:
    lr, text = suggested_rate([(optimizer, 0.1)] * 2, 32, 128)
    assert lr == pytest.approx(expected)
    assert f"Learning rate to try: {expected:g} (scaled from 0.1 at batch size 32, {rule}" in text


def test_the_same_size_has_the_same_rate() -> None:
    assert suggested_rate([("Adam", 0.123456)], 32, 32)[0] == 0.123456


@pytest.mark.parametrize(
    ("used", "text"),
    [
        ([], "the module has no different learning rates"),
        ([("LBFGS", 1.0)], "not for LBFGS"),
        ([("Adam", 0.0001), ("Adam", 0.0004)], "the module has 2 different learning rates"),
    ],
)
def test_there_is_no_single_one(used: list[tuple[str, float]], text: str) -> None:
    lr, message = suggested_rate(used, 32, 128)
    assert lr is None
    assert text in message


# -- results -----------------------------------------------------------------------------------------------------------

POINTS = (Measurement(32, 0.5, 10.0), Measurement(1024, math.inf, math.nan))
FAILED = BatchSizeResult(0, math.nan, math.nan, None, "KeyError: a | b", (), "KeyError: a | b")
FOUND = BatchSizes({"fp32": BatchSizeResult(1000, 3.96, 12_345.6, 0.0057, "It fits.", POINTS), "a | b": FAILED})


def test_markdown() -> None:
    assert str(FOUND) == (
        "| precision | batch size | peak memory | samples/s | learning rate to try |\n"
        "| --- | --: | --: | --: | --: |\n"
        "| fp32 | 1,000 | 3.96 GiB | 12,300 | 0.0057 |\n"
        "| a \\| b | none |  |  |  |\n"
        "\n"
        "**fp32**: It fits.\n"
        "\n"
        "**a | b**: KeyError: a | b\n"
    )


def test_json_has_no_nan(tmp_path: Path) -> None:
    FOUND.to_json(tmp_path / "found.json")
    data = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert data["fp32"]["batch_size"] == 1000
    assert data["fp32"]["measured"] == [
        {"batch_size": 32, "peak_gib": 0.5, "samples_per_s": 10.0},
        {"batch_size": 1024, "peak_gib": None, "samples_per_s": None},
    ]
    assert (data["a | b"]["error"], data["a | b"]["peak_gib"]) == ("KeyError: a | b", None)
