"""From runs to lines: means over seeds, gaps, fewer points, the steps of a loss scale."""

from __future__ import annotations

import math
import random

import pytest

from lightning_amp.findings import StepRecord
from lightning_amp.verdicts._arm_run import Point
from lightning_amp.verdicts._curves import XY, Time, line_of, scale_line, thinned, unit_of_time

NAN, INF = math.nan, math.inf


def curve(*values: float, step_s: float = 0.5) -> list[Point]:
    return [Point(10 * (i + 1), 10 * (i + 1) * step_s, value) for i, value in enumerate(values)]


def test_one_seed_is_its_own_mean() -> None:
    line = line_of("fp16", "arm-1", [curve(3.0, 2.0)])
    assert line.seeds == []
    assert line.mean == [(10, 3.0), (20, 2.0)]


def test_the_mean_over_steps_and_over_time() -> None:
    curves = [curve(3.0, 2.0), curve(5.0, 3.0, step_s=1.5)]
    assert line_of("", "", curves).mean == [(10, 4.0), (20, 2.5)]
    assert line_of("", "", curves, time=Time("min", 60.0)).mean == [(10 / 60, 4.0), (20 / 60, 2.5)]
    assert line_of("", "", curves, time=Time("s", 1.0)).seeds[1] == [(15.0, 5.0), (30.0, 3.0)]


def test_the_mean_is_of_steps_that_all_seeds_have() -> None:
    assert line_of("", "", [curve(3.0, 2.0, 1.0), curve(5.0, 3.0)]).mean == [(10, 4.0), (20, 2.5)]
    assert line_of("", "", [curve(3.0), []]).mean == []
    assert line_of("", "", []).mean == []


def test_a_seed_that_is_not_finite_is_a_gap_of_the_mean() -> None:
    line = line_of("", "", [curve(3.0, NAN, NAN), curve(5.0, 3.0, 1.0)])
    assert math.isnan(line.mean[1].y)
    assert line.marks == [(10, 3.0)]


def test_a_gap_that_closes_has_no_cross() -> None:
    assert line_of("", "", [curve(3.0, NAN, 2.0)]).marks == []
    assert line_of("", "", [curve(NAN, NAN)]).marks == []
    assert line_of("", "", [curve(1.0, INF)]).marks == [(10, 1.0)]


def test_the_mean_of_huge_values_does_not_overflow() -> None:
    assert line_of("", "", [curve(1.5e308), curve(1.5e308)]).mean[0].y == 1.5e308


def test_thinning_keeps_peaks_gaps_and_ends() -> None:
    rng = random.Random(0)
    points = [XY(x, rng.random()) for x in range(5000)]
    points[1234] = XY(1234, 99.0)
    points[2345] = XY(2345, -99.0)
    points[3456] = XY(3456, NAN)
    kept = thinned(points, 100)
    assert 80 <= len(kept) <= 101
    assert {points[0], points[1234], points[2345], points[-1]} <= set(kept)
    assert sum(math.isnan(p.y) for p in kept) == 1
    assert [p.x for p in kept] == sorted(p.x for p in kept)


def test_few_points_stay() -> None:
    points = [XY(x, 1.0) for x in range(100)]
    assert thinned(points, 100) == points


@pytest.mark.parametrize(("seconds", "unit"), [(12.0, "s"), (400.0, "min"), (20_000.0, "h")])
def test_units_of_time(seconds: float, unit: str) -> None:
    assert unit_of_time(seconds).name == unit


def record(index: int, scale: float, next_scale: float, skipped: bool = False) -> StepRecord:
    return StepRecord(index, 0, scale, next_scale, skipped, "gradient" if skipped else "none")


def test_the_scale_goes_in_steps() -> None:
    records = [record(0, 8.0, 4.0, True), record(9, 4.0, 8.0), record(19, 8.0, 8.0)]
    line = scale_line("fp16", "arm-1", [records])
    assert line.mean == [(0, 3.0), (1, 3.0), (1, 2.0), (10, 2.0), (10, 3.0), (20, 3.0)]
    assert line.marks == [(1, 3.0)]
    assert line.seeds == []


def test_the_scales_of_two_seeds_are_two_lines() -> None:
    line = scale_line("fp16", "arm-1", [[record(0, 8.0, 8.0)], [record(0, 4.0, 4.0)]])
    assert line.seeds == [[(0, 3.0), (1, 3.0)], [(0, 2.0), (1, 2.0)]]
    assert not line.mean


def test_a_scale_that_was_set_between_two_records_jumps() -> None:
    line = scale_line("", "", [[record(0, 8.0, 8.0), record(5, 2.0, 2.0)]])
    assert line.mean == [(0, 3.0), (1, 3.0), (1, 1.0), (6, 1.0)]


def test_a_scale_of_zero_is_a_gap() -> None:
    line = scale_line("", "", [[record(0, 2.0**-149, 0.0, True), record(1, 0.0, 0.0, True)]])
    assert line.mean[1].y == -149
    assert math.isnan(line.mean[-1].y)
