"""From runs to the lines of a chart: means over seeds, fewer points, steps of a loss scale. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_amp.findings import StepRecord
from lightning_amp.verdicts._arm_run import Point
from lightning_amp.verdicts._axes import can_be_drawn


class XY(NamedTuple):
    """A point of a chart; NaN as `y` is a gap."""

    x: float
    y: float


class Line(NamedTuple):
    """What one arm is in a chart.

    Attributes:
        label: Of the arm.
        style: Its class in the style sheet: `"arm-1"`.
        seeds: A thin line for each.
        mean: The thick line; empty for none.
        marks: Where a cross is.

    """

    label: str
    style: str
    seeds: Sequence[Sequence[XY]]
    mean: Sequence[XY] = ()
    marks: Sequence[XY] = ()


class Time(NamedTuple):
    """A unit of time, and how many seconds it has."""

    name: str
    seconds: float


def unit_of_time(seconds: float) -> Time:
    """Return the unit in which so many seconds are easy to read."""
    return Time("s", 1.0) if seconds < 300 else Time("min", 60.0) if seconds < 3 * 3600 else Time("h", 3600.0)


def line_of(
    label: str, style: str, curves: Sequence[Sequence[Point]], *, time: Time | None = None, most: int = 200
) -> Line:
    """Return one arm's line over steps, or over training time: of several seeds their mean, of a single one itself.

    The mean is over the seeds at each step that all of them have a point for; over time it lies at the mean of their
    times. A cross marks the last value before a curve ceases to be finite.

    Args:
        label: Of the arm.
        style: Of the arm.
        curves: One per seed.
        time: The unit of the x axis; steps without one.
        most: Points per line; more are thinned out.

    """
    seeds = [[XY(p.step if time is None else p.train_s / time.seconds, p.value) for p in curve] for curve in curves]
    mean = [XY(p.step if time is None else p.train_s / time.seconds, p.value) for p in _mean(curves)]
    return Line(
        label,
        style,
        [thinned(seed, most) for seed in seeds] if len(seeds) > 1 else [],
        thinned(mean, most),
        [end for seed in seeds for end in _ends(seed)],
    )


def _mean(curves: Sequence[Sequence[Point]]) -> list[Point]:
    if len(curves) < 2:
        return list(curves[0]) if curves else []
    by_step = [{point.step: point for point in curve} for curve in curves]
    steps = sorted(set(by_step[0]).intersection(*by_step[1:]))
    return [
        Point(step, _fmean(c[step].train_s for c in by_step), _fmean(c[step].value for c in by_step)) for step in steps
    ]


def _fmean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(value / len(found) for value in found)  # `fmean` raises where a sum overflows


def _ends(points: Sequence[XY]) -> list[XY]:
    """Return the last point that can be drawn, if others follow it that cannot."""
    good = [i for i, point in enumerate(points) if can_be_drawn(point.y)]
    return [points[good[-1]]] if good and good[-1] < len(points) - 1 else []


def thinned(points: Sequence[XY], most: int) -> list[XY]:
    """Return at most about so many points, peaks and gaps included.

    Of each bucket of neighbours the lowest and the highest value are kept, and a gap if there is one.
    """
    if len(points) <= most:
        return list(points)
    buckets = max(1, (most - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for i in range(buckets):
        bucket = inner[len(inner) * i // buckets : len(inner) * (i + 1) // buckets]
        good = [j for j, point in enumerate(bucket) if can_be_drawn(point.y)]
        gap = [j for j in range(len(bucket)) if j not in set(good)][:1]
        extremes = [min(good, key=lambda j: bucket[j].y), max(good, key=lambda j: bucket[j].y)] if good else []
        kept += [bucket[j] for j in sorted({*extremes, *gap})]
    return [*kept, points[-1]]


def scale_line(label: str, style: str, histories: Sequence[Sequence[StepRecord]], *, most: int = 400) -> Line:
    """Return log2 of the loss scale over optimizer steps, as steps, with a cross at each skip.

    Between two stored records the scale was that of the later one. A scale of 0 is a gap.

    Args:
        label: Of the arm.
        style: Of the arm.
        histories: The records of each seed.
        most: Points per line; more are thinned out.

    """
    seeds: list[list[XY]] = []
    marks: list[XY] = []
    for records in histories:
        corners: list[XY] = []
        start = records[0].index if records else 0
        for record in records:
            corners += [XY(start, _log2(record.scale)), XY(record.index + 1, _log2(record.scale))]
            start = record.index + 1
            corners.append(XY(start, _log2(record.next_scale)))
        seeds.append(thinned([xy for i, xy in enumerate(corners) if i == 0 or xy != corners[i - 1]], most))
        marks += [XY(record.index + 1, _log2(record.scale)) for record in records if record.skipped]
    return Line(label, style, seeds if len(seeds) > 1 else [], seeds[0] if len(seeds) == 1 else [], marks)


def _log2(scale: float) -> float:
    return math.log2(scale) if scale > 0 else math.nan
