"""Which charts a report has: which arms are in them, on which axes, with which words beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_amp._text import counted
from lightning_amp.compare._arm import ArmMetric
from lightning_amp.compare._judge import Judgement
from lightning_amp.compare._run import ArmRun, Point
from lightning_amp.compare.views._svg import (
    CONTROL_STYLE,
    XY,
    Interval,
    Line,
    axis_from_zero,
    axis_of,
    axis_of_exponents,
    can_be_drawn,
    forest,
    line_chart,
)
from lightning_amp.compare.views._words import NONE, metric_names, signed
from lightning_amp.findings import StepRecord, before_fallback

_NUM_STYLES = 7  # of arms other than the reference, in the style sheet; further ones begin again
_NOT_FINITE = "not finite"
_MOST_POINTS = 55_000  # of all charts together: each takes about 11 bytes


class Chart(NamedTuple):
    """What is drawn of one metric or one arm.

    Attributes:
        heading: The metric, or the arm.
        note: Some words below it.
        arms: The labels of those that are in it.
        pictures: SVG.

    """

    heading: str
    note: str
    arms: tuple[str, ...]
    pictures: tuple[str, ...]


def styles(report: Judgement) -> dict[str, str]:
    """Return the class of each arm in the style sheet: one colour and one pattern of dashes in all charts."""
    found: dict[str, str] = {}
    for i, arm in enumerate(report.arms.values()):
        found[arm.label] = CONTROL_STYLE if arm.is_control else f"arm-{0 if i == 0 else 1 + (i - 1) % _NUM_STYLES}"
    return found


def metrics_of(report: Judgement, name: str) -> dict[str, ArmMetric]:
    """Return one metric of all arms that have it, by label."""
    return {label: arm.metrics[name] for label, arm in report.arms.items() if name in arm.metrics}


def describe(report: Judgement, name: str) -> str:
    """Say which way a metric is better, and what it may cost."""
    metrics = metrics_of(report, name).values()
    direction = next((metric.direction for metric in metrics if metric.direction), None)
    margin = next((metric.margin for metric in metrics if metric.margin is not None), None)
    words = {"min": "lower is better", "max": "higher is better"}.get(direction or "", "no known better direction")
    return words if margin is None else f"{words}, margin {margin:g}"


# -- differences -------------------------------------------------------------------------------------------------------


def difference_charts(report: Judgement) -> list[Chart]:
    """Draw the differences of each metric in which an arm can be compared with the reference."""
    of, charts = styles(report), list[Chart]()
    for name in metric_names(report):
        metrics = metrics_of(report, name)
        found = [_interval(label, of[label], metric) for label, metric in metrics.items()]
        rows = [row for row in found if row is not None]
        if rows:
            one = next(iter(metrics.values()))
            title = f"{name}, difference to {report.plan.reference}: {'; '.join(f'{r.label} {r.text}' for r in rows)}"
            picture = forest(rows, title=title, margin=one.margin, direction=one.direction)
            charts.append(Chart(name, describe(report, name), tuple(row.label for row in rows), (picture,)))
    return charts


def _interval(label: str, style: str, metric: ArmMetric) -> Interval | None:
    difference = metric.difference
    if difference is None or not difference.values or difference.mean is None:
        return None
    number = signed(difference.mean) if math.isfinite(difference.mean) else _NOT_FINITE
    return Interval(
        label,
        style,
        number,
        difference_in_words(metric),
        difference.mean,
        difference.low,
        difference.high,
        difference.values,
    )


def difference_in_words(metric: ArmMetric) -> str:
    """Write a mean difference and its interval: `+0.0012 (-0.001 to +0.0034)`."""
    difference = metric.difference
    if difference is None or not difference.values or difference.mean is None:
        return NONE
    mean, low, high = difference.mean, difference.low, difference.high
    if not math.isfinite(mean):
        return _NOT_FINITE
    return signed(mean) if low is None or high is None else f"{signed(mean)} ({signed(low)} to {signed(high)})"


# -- curves ------------------------------------------------------------------------------------------------------------

Curves = Mapping[str, Sequence[Sequence[Point]]]
"""The curves of each arm's seeds, by label."""


def curve_charts(report: Judgement) -> list[Chart]:
    """Draw each metric, and the training loss, over steps and over training time. All share their x axes."""
    drawn = [
        (name, describe(report, name), _curves(report, lambda run, name=name: run.curves.get(name, ())))
        for name in metric_names(report)
    ]
    drawn.append(("Training loss", "as the module returned it", _curves(report, lambda run: run.loss)))
    drawn = [(name, note, curves) for name, note, curves in drawn if curves]
    seeds = [seed for _, _, curves in drawn for own in curves.values() for seed in own]
    num_lines = 2 * (len(seeds) + sum(len(curves) for _, _, curves in drawn))
    points = [point for seed in seeds for point in seed]
    return [
        Chart(name, note, tuple(curves), _over_both(report, name, curves, points, _MOST_POINTS // num_lines))
        for name, note, curves in drawn
    ]


def _curves(report: Judgement, of: Callable[[ArmRun], Sequence[Point]]) -> Curves:
    found = {label: [of(run) for run in arm.finished if of(run)] for label, arm in report.arms.items()}
    return {label: seeds for label, seeds in found.items() if seeds}


def _over_both(report: Judgement, name: str, curves: Curves, points: Sequence[Point], most: int) -> tuple[str, str]:
    """Draw curves over steps and over time, on x axes that hold `points`."""
    of = styles(report)
    below = {CONTROL_STYLE: 0, of[report.plan.reference]: 1}
    order = sorted(curves, key=lambda label: below.get(of[label], 2))
    time = unit_of_time(max(point.train_s for point in points))
    steps = axis_from_zero((point.step for point in points), whole=True)
    seconds = axis_from_zero(point.train_s / time.seconds for point in points)
    y = axis_of((p.value for seeds in curves.values() for seed in seeds for p in seed), may_be_log=True)
    most = min(240, max(16, most))
    arms = ", ".join(curves)
    return (
        line_chart(
            [line_of(label, of[label], curves[label], most=most) for label in order],
            steps,
            y,
            title=f"{name} over training steps: {arms}",
            x_label="training steps",
        ),
        line_chart(
            [line_of(label, of[label], curves[label], time=time, most=most) for label in order],
            seconds,
            y,
            title=f"{name} over training time: {arms}",
            x_label=f"training time, {time.name}",
        ),
    )


# -- loss scale --------------------------------------------------------------------------------------------------------


def scale_charts(report: Judgement) -> list[Chart]:
    """Draw the loss scale of each arm that has one; all share their axes."""
    of = styles(report)
    histories = {
        label: [before_fallback(run.scale) for run in arm.finished if run.scale]
        for label, arm in report.arms.items()
        if arm.final_scales
    }
    lines = {label: scale_line(label, of[label], found) for label, found in histories.items()}
    corners = [xy for line in lines.values() for points in (*line.seeds, line.mean, line.marks) for xy in points]
    x, y = axis_from_zero((xy.x for xy in corners), whole=True), axis_of_exponents(xy.y for xy in corners)
    charts: list[Chart] = []
    for label, line in lines.items():
        arm = report.arms[label]
        note = f"{arm.num_skipped:,} of {arm.num_skipped + arm.num_steps:,} steps skipped"
        if len(arm.finished) > 1:
            note += f", {counted(len(arm.finished), 'seed')} together"
        title = f"Loss scale of {label} over optimizer steps: {note}"
        picture = line_chart([line], x, y, title=title, x_label="optimizer steps attempted", height=170)
        charts.append(Chart(label, note, (label,), (picture,)))
    return charts


# -- from runs to lines ------------------------------------------------------------------------------------------------


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
