"""From a report to its charts: which arms, which axes, which words beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightning_amp._text import counted
from lightning_amp.findings import before_fallback
from lightning_amp.verdicts._arm import ArmMetric
from lightning_amp.verdicts._arm_run import ArmRun, Point
from lightning_amp.verdicts._axes import axis_from_zero, axis_of, axis_of_exponents
from lightning_amp.verdicts._charts import CONTROL_STYLE, Interval, forest, line_chart
from lightning_amp.verdicts._curves import line_of, scale_line, unit_of_time
from lightning_amp.verdicts._words import NONE, signed

if TYPE_CHECKING:
    from lightning_amp.verdicts._report import PrecisionReport

_NUM_STYLES = 7  # of arms other than the reference, in the style sheet; further ones begin again
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


def styles(report: PrecisionReport) -> dict[str, str]:
    """Return the class of each arm in the style sheet: one colour and one pattern of dashes in all charts."""
    found: dict[str, str] = {}
    for i, arm in enumerate(report.arms.values()):
        found[arm.label] = CONTROL_STYLE if arm.is_control else f"arm-{0 if i == 0 else 1 + (i - 1) % _NUM_STYLES}"
    return found


def metric_names(report: PrecisionReport) -> list[str]:
    """Return the names of all metrics, in the order in which they were logged."""
    return list(dict.fromkeys(name for arm in report.arms.values() for name in arm.metrics))


def metrics_of(report: PrecisionReport, name: str) -> dict[str, ArmMetric]:
    """Return one metric of all arms that have it, by label."""
    return {label: arm.metrics[name] for label, arm in report.arms.items() if name in arm.metrics}


def describe(report: PrecisionReport, name: str) -> str:
    """Say which way a metric is better, and what it may cost."""
    metrics = metrics_of(report, name).values()
    direction = next((metric.direction for metric in metrics if metric.direction), None)
    margin = next((metric.margin for metric in metrics if metric.margin is not None), None)
    words = {"min": "lower is better", "max": "higher is better"}.get(direction or "", "no known better direction")
    return words if margin is None else f"{words}, margin {margin:g}"


# -- differences -------------------------------------------------------------------------------------------------------


def difference_charts(report: PrecisionReport) -> list[Chart]:
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
    number, _, _ = (text := difference_in_words(metric)).partition(" (")
    return Interval(label, style, number, text, difference.mean, difference.low, difference.high, difference.values)


def difference_in_words(metric: ArmMetric) -> str:
    """Write a mean difference and its interval: `+0.0012 (-0.001 to +0.0034)`."""
    difference = metric.difference
    if difference is None or not difference.values or difference.mean is None:
        return NONE
    mean, low, high = difference.mean, difference.low, difference.high
    if not math.isfinite(mean):
        return "not finite"
    return signed(mean) if low is None or high is None else f"{signed(mean)} ({signed(low)} to {signed(high)})"


# -- curves ------------------------------------------------------------------------------------------------------------

Curves = Mapping[str, Sequence[Sequence[Point]]]
"""The curves of each arm's seeds, by label."""


def curve_charts(report: PrecisionReport) -> list[Chart]:
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


def _curves(report: PrecisionReport, of: Callable[[ArmRun], Sequence[Point]]) -> Curves:
    found = {label: [of(run) for run in arm.finished if of(run)] for label, arm in report.arms.items()}
    return {label: seeds for label, seeds in found.items() if seeds}


def _over_both(
    report: PrecisionReport, name: str, curves: Curves, points: Sequence[Point], most: int
) -> tuple[str, str]:
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


def scale_charts(report: PrecisionReport) -> list[Chart]:
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
