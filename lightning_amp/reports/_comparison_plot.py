"""Draw each metric in AMP and in fp32, and next to it the difference between the two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_amp.findings import ComparisonRow
from lightning_amp.reports._figures import new_figure, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = Mapping[str, Sequence[ComparisonRow]]

# The two lines nearly coincide, so the thin line of AMP is drawn on the wide, pale line of fp32.
_AMP: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1}
_FP32: dict[str, Any] = {"marker": "o", "markersize": 9, "markeredgewidth": 0, "linewidth": 4, "alpha": 0.35}
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
"""The place of a long legend: it would hide lines inside the panel."""


def plot_comparison(
    groups: Mapping[str, Lines], tolerance_of: Callable[[str], float | None], left_out: str = ""
) -> Figure:
    """Draw two panels for each metric: the values of AMP and fp32, and their difference. Each loader is a line."""
    number = max(len(groups), 1)
    figure = new_figure(10.0, 0.6 + 2.0 * number)
    if left_out:
        figure.suptitle(left_out, fontsize="medium")
    axes: Any = figure.subplots(number, 2, sharex=True, squeeze=False)
    label, place = _horizontal(groups)
    for (values, differences), (group, lines) in zip(axes, groups.items(), strict=False):
        for i, (metric, rows) in enumerate(lines.items()):
            where = [place(row) for row in rows]
            loader = metric.removeprefix(group).lstrip("/").replace("dataloader_idx_", "loader ")
            suffix = f", {loader}" if loader else ""
            style = {"color": f"C{i % 10}"} | ({"marker": ""} if len(rows) > 50 else {})
            values.plot(where, [_drawn(row.fp32) for row in rows], label=f"fp32{suffix}", **_FP32 | style)
            values.plot(where, [_drawn(row.amp) for row in rows], label=f"AMP{suffix}", **_AMP | style)
            differences.plot(where, [_drawn(row.diff) for row in rows], label=f"AMP - fp32{suffix}", **_AMP | style)
        rows = [row for rows in lines.values() for row in rows]
        _mark_non_finite(values, [(place(r), r.amp if math.isfinite(r.fp32) else r.fp32) for r in rows])
        _mark_non_finite(differences, [(place(r), r.diff) for r in rows])
        _scale_values(values, rows)
        _scale_differences(differences, rows, {t for metric in lines if (t := tolerance_of(metric)) is not None})
        values.set_ylabel(_in_lines(group))
        for axis in (values, differences):
            axis.legend(fontsize="small" if len(lines) < 5 else "x-small", **_BESIDE if len(lines) > 2 else {})
    axes[0, 0].set_title("value")
    axes[0, 1].set_title("AMP - fp32")
    if not groups:
        for axis in axes.flat:
            say_empty(axis, "no comparison yet")
    _ticks(axes, label, sorted({place(row) for lines in groups.values() for rows in lines.values() for row in rows}))
    return figure


def _horizontal(groups: Mapping[str, Lines]) -> tuple[str, Callable[[ComparisonRow], float]]:
    """Use epochs as the x axis, or steps if an epoch has several comparisons."""
    several = any(len({row.epoch for row in rows}) < len(rows) for lines in groups.values() for rows in lines.values())
    return ("step", lambda row: row.step) if several else ("epoch", lambda row: row.epoch)


def _drawn(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _mark_non_finite(axis: Any, points: list[tuple[float, float]]) -> None:
    """Mark values that are not finite, because a gap alone is easy to overlook."""
    where = sorted({x for x, value in points if not math.isfinite(value)})
    if where:
        y = [0.06] * len(where)
        axis.plot(where, y, "x", color="tab:red", transform=axis.get_xaxis_transform(), label="NaN or inf")


def _scale_values(axis: Any, rows: list[ComparisonRow]) -> None:
    """Let the axis span at least a tenth of the values, because this panel shows their size."""
    values = [value for row in rows for value in (row.amp, row.fp32) if math.isfinite(value)]
    if values:
        low, high = min(values), max(values)
        room = max(0.1 * (high - low), 0.05 * max(abs(low), abs(high))) or 1.0
        axis.set_ylim(low - room, high + room)
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)


def _scale_differences(axis: Any, rows: list[ComparisonRow], tolerances: set[float]) -> None:
    """Put zero in the middle, and limit the axis: otherwise a large tolerance would flatten the differences."""
    largest = max((abs(row.diff) for row in rows if math.isfinite(row.diff)), default=0.0)
    finite = sorted(tolerance for tolerance in tolerances if math.isfinite(tolerance))
    near = [tolerance for tolerance in finite if tolerance < 10 * largest or not largest]
    height = 1.2 * max([largest, *near])
    axis.hlines(0.0, 0, 1, transform=axis.get_yaxis_transform(), color="0.6", linewidth=0.8, zorder=0)
    for tolerance in finite:
        label = f"tolerance {tolerance:g}" + ("" if tolerance in near else " (beyond this panel)")
        axis.axhspan(-tolerance, tolerance, color="tab:green", alpha=0.12, zorder=0, label=label)
    axis.set_ylim(-(height or 1.0), height or 1.0)
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)
    if not height:
        axis.set_yticks([0.0])


def _in_lines(name: str, length: int = 22) -> str:
    """Break a long name at its separators, so that it fits next to a panel."""
    lines = [""]
    for part in re.split(r"(?<=[._/])", name):
        if lines[-1] and len(lines[-1]) + len(part) > length:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _ticks(axes: Any, label: str, places: list[float]) -> None:
    for axis in axes[-1] if places else ():
        axis.set_xlabel(label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(places) == 1:
        axes[0, 0].set_xlim(places[0] - 0.5, places[0] + 0.5)
        for axis in axes[-1]:
            axis.set_xticks(places)
