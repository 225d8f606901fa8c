"""Choose the charts of a report: their arms, their axes, and their captions."""

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
from lightning_amp.findings import StepRecord

_NUM_STYLES = 7
"""Number of styles in the style sheet for arms other than the reference; more arms share them."""

_NOT_FINITE = "not finite"

_MOST_POINTS = 55_000
"""Largest number of points in all charts together; each takes about 11 bytes of the page."""


class Chart(NamedTuple):
    """The pictures of one metric or one arm, as SVG, under a heading with a note."""

    heading: str
    note: str
    pictures: tuple[str, ...]


def styles(report: Judgement) -> dict[str, str]:
    """Return the class of each arm in the style sheet. An arm has the same colour and dashes in all charts."""
    found: dict[str, str] = {}
    for i, arm in enumerate(report.arms.values()):
        found[arm.label] = CONTROL_STYLE if arm.is_control else f"arm-{0 if i == 0 else 1 + (i - 1) % _NUM_STYLES}"
    return found


def metrics_of(report: Judgement, name: str) -> dict[str, ArmMetric]:
    """Return one metric of all arms that have it, by label."""
    return {label: arm.metrics[name] for label, arm in report.arms.items() if name in arm.metrics}


def describe(report: Judgement, name: str) -> str:
    """Write the better direction of a metric, and its margin."""
    metric = next(iter(metrics_of(report, name).values()))
    words = {"min": "lower is better", "max": "higher is better"}.get(
        metric.direction or "", "better direction unknown"
    )
    return words if metric.margin is None else f"{words}, margin {metric.margin:g}"


# -- differences -------------------------------------------------------------------------------------------------------


def difference_charts(report: Judgement) -> list[Chart]:
    """Draw the differences of each metric in which an arm can be compared with the reference."""
    style, charts = styles(report), list[Chart]()
    for name in metric_names(report):
        rows: list[Interval] = []
        metrics = metrics_of(report, name)
        for label, metric in metrics.items():
            difference = metric.difference
            if difference is not None and difference.mean is not None:
                mean, bounds, words = difference.mean, difference.bounds(), difference_in_words(metric)
                number = signed(mean) if math.isfinite(mean) else _NOT_FINITE
                rows.append(Interval(label, style[label], number, words, mean, bounds, difference.values))
        if rows:
            one = next(iter(metrics.values()))
            title = f"{name}, difference to {report.plan.reference}: {'; '.join(f'{r.label} {r.text}' for r in rows)}"
            picture = forest(rows, title=title, margin=one.margin, direction=one.direction)
            charts.append(Chart(name, describe(report, name), (picture,)))
    return charts


def difference_in_words(metric: ArmMetric) -> str:
    """Write a mean difference and its interval: `+0.0012 (-0.001 to +0.0034)`."""
    difference = metric.difference
    if difference is None or difference.mean is None:
        return NONE
    if not math.isfinite(difference.mean):
        return _NOT_FINITE
    bounds = difference.bounds()
    return signed(difference.mean) + ("" if bounds is None else f" ({signed(bounds[0])} to {signed(bounds[1])})")


# -- curves ------------------------------------------------------------------------------------------------------------

Curves = Mapping[str, Sequence[Sequence[Point]]]
"""The curves of each arm's seeds, by label."""


def curve_charts(report: Judgement) -> list[Chart]:
    """Draw each metric, and the training loss, over steps and over training time. All charts share their x axes."""
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
        Chart(name, note, _over_both(report, name, curves, points, min(240, max(16, _MOST_POINTS // num_lines))))
        for name, note, curves in drawn
    ]


def _curves(report: Judgement, of: Callable[[ArmRun], Sequence[Point]]) -> Curves:
    found = {label: [of(run) for run in arm.finished if of(run)] for label, arm in report.arms.items()}
    return {label: seeds for label, seeds in found.items() if seeds}


def _over_both(report: Judgement, name: str, curves: Curves, points: Sequence[Point], most: int) -> tuple[str, str]:
    """Draw curves over steps and over time, on x axes that hold `points`."""
    style = styles(report)
    below = {CONTROL_STYLE: 0, style[report.plan.reference]: 1}
    order = sorted(curves, key=lambda label: below.get(style[label], 2))
    time = unit_of_time(max(point.train_s for point in points))
    y = axis_of((p.value for seeds in curves.values() for seed in seeds for p in seed), may_be_log=True)

    def over(what: str, unit: Time | None, unit_name: str) -> str:
        x = axis_from_zero((x_of(point, unit) for point in points), whole=unit is None)
        lines = [line_of(label, style[label], curves[label], time=unit, most=most) for label in order]
        return line_chart(lines, x, y, title=f"{name} over {what}: {', '.join(curves)}", x_label=f"{what}{unit_name}")

    return over("training steps", None, ""), over("training time", time, f", {time.name}")


# -- loss scale --------------------------------------------------------------------------------------------------------


def scale_charts(report: Judgement) -> list[Chart]:
    """Draw the loss scale of each arm that has one; all charts share their axes."""
    style = styles(report)
    lines = {
        label: scale_line(label, style[label], [run.scale for run in arm.finished if run.scale])
        for label, arm in report.arms.items()
        if arm.final_scales
    }
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
        charts.append(Chart(label, note, (picture,)))
    return charts


# -- from runs to lines ------------------------------------------------------------------------------------------------


class Time(NamedTuple):
    """A unit of time, and its length in seconds."""

    name: str
    seconds: float


def unit_of_time(seconds: float) -> Time:
    """Return the unit in which a number of seconds is easy to read."""
    return Time("s", 1.0) if seconds < 300 else Time("min", 60.0) if seconds < 3 * 3600 else Time("h", 3600.0)


def x_of(point: Point, time: Time | None) -> float:
    """Return the time of a point in a unit, or its step without one."""
    return point.step if time is None else point.train_s / time.seconds


def line_of(
    label: str, style: str, curves: Sequence[Sequence[Point]], *, time: Time | None = None, most: int = 200
) -> Line:
    """Return one arm's line over training time, or over steps without a unit of time, with `most` points per curve.

    The thick line is the mean over the seeds, at each step for which all of them have a point. Over time, each mean is
    drawn at the mean of their times. With a single seed, its curve is the mean. A cross marks the last finite value of
    a curve that diverges.
    """
    seeds = [[XY(x_of(point, time), point.value) for point in curve] for curve in curves]
    mean = [XY(x_of(point, time), point.value) for point in _mean(curves)]
    return Line(
        label,
        style,
        [thinned(seed, most) for seed in seeds] if len(seeds) > 1 else [],
        thinned(mean, most),
        [end for seed in seeds for end in _ends(seed)],
    )


def _mean(curves: Sequence[Sequence[Point]]) -> list[Point]:
    by_step = [{point.step: point for point in curve} for curve in curves]
    steps = sorted(set(by_step[0]).intersection(*by_step[1:]))
    return [
        Point(step, _fmean(c[step].train_s for c in by_step), _fmean(c[step].value for c in by_step)) for step in steps
    ]


def _fmean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(value / len(found) for value in found)  # `fmean` raises where a sum overflows


def _ends(points: Sequence[XY]) -> list[XY]:
    """Return the last point that can be drawn, if later points cannot be drawn."""
    good = [i for i, point in enumerate(points) if can_be_drawn(point.y)]
    return [points[good[-1]]] if good and good[-1] < len(points) - 1 else []


def thinned(points: Sequence[XY], most: int) -> list[XY]:
    """Return about `most` points or fewer, with the peaks and gaps.

    Each bucket of neighbours keeps its lowest and its highest value, and a gap if there is one.
    """
    if len(points) <= most:
        return list(points)
    buckets = max(1, (most - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for i in range(buckets):
        bucket = inner[len(inner) * i // buckets : len(inner) * (i + 1) // buckets]
        good = [j for j, point in enumerate(bucket) if can_be_drawn(point.y)]
        gap = [j for j, point in enumerate(bucket) if not can_be_drawn(point.y)][:1]
        extremes = [min(good, key=lambda j: bucket[j].y), max(good, key=lambda j: bucket[j].y)] if good else []
        kept += [bucket[j] for j in sorted({*extremes, *gap})]
    return [*kept, points[-1]]


def scale_line(label: str, style: str, histories: Sequence[Sequence[StepRecord]], *, most: int = 400) -> Line:
    """Return the binary logarithm of the loss scale over optimizer steps, with a cross at each skip.

    Each history holds the records of one seed. Between two stored records the scale was the scale of the later one. A
    scale of 0 is a gap.
    """
    seeds: list[list[XY]] = []
    marks: list[XY] = []
    for records in histories:
        corners: list[XY] = []
        start = records[0].index
        for record in records:
            corners += [XY(start, _log2(record.scale)), XY(record.index + 1, _log2(record.scale))]
            start = record.index + 1
            corners.append(XY(start, _log2(record.next_scale)))
        seeds.append(thinned([xy for i, xy in enumerate(corners) if i == 0 or xy != corners[i - 1]], most))
        marks += [XY(record.index + 1, _log2(record.scale)) for record in records if record.skipped]
    return Line(label, style, seeds if len(seeds) > 1 else [], seeds[0] if len(seeds) == 1 else [], marks)


def _log2(scale: float) -> float:
    return math.log2(scale) if scale > 0 else math.nan
