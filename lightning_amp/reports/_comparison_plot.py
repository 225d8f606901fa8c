"""Draw each metric in AMP and in fp32, and next to it the difference between the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_amp.findings import ComparisonRow
from lightning_amp.reports._figures import COLORS, new_figure, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = Mapping[str, Sequence[ComparisonRow]]

# The two lines nearly coincide, so the thin line of AMP is drawn on the wide, pale line of fp32.
_AMP: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1}
_FP32: dict[str, Any] = {"marker": "o", "markersize": 9, "markeredgewidth": 0, "linewidth": 4, "alpha": 0.35}


def plot_comparison(groups: Mapping[str, Lines], tolerance_of: Callable[[str], float | None], title: str) -> Figure:
    """Draw two panels for each metric: the values of AMP and fp32, and their difference. Each loader is a line."""
    number = max(len(groups), 1)
    figure = new_figure(10.0, 0.6 + 2.0 * number)
    if title:
        figure.suptitle(title, fontsize="medium")
    axes: Any = figure.subplots(number, 2, sharex=True, squeeze=False)
    axes[0, 0].set_title("value")
    axes[0, 1].set_title("AMP - fp32")
    for axis in [] if groups else axes.flat:
        say_empty(axis, "no comparison yet")
    every = [row for lines in groups.values() for rows in lines.values() for row in rows]
    # epochs, or steps if an epoch has several comparisons
    where = "step" if len({(row.epoch, row.metric) for row in every}) < len(every) else "epoch"
    for (values, differences), (group, lines) in zip(axes, groups.items(), strict=False):
        values.set_ylabel(group.replace("/", "/\n"))
        for i, (metric, rows) in enumerate(lines.items()):
            places = [getattr(row, where) for row in rows]
            loader = metric.removeprefix(group).replace("/dataloader_idx_", ", loader ")
            style = {"color": COLORS[i % len(COLORS)]} | ({"marker": ""} if len(rows) > 50 else {})
            for axis, name, kind, drawn in (
                (values, "fp32", "fp32", _FP32),
                (values, "amp", "AMP", _AMP),
                (differences, "diff", "AMP - fp32", _AMP),
            ):
                finite = [value if math.isfinite(value) else math.nan for row in rows for value in [getattr(row, name)]]
                axis.plot(places, finite, label=f"{kind}{loader}", **drawn | style)
        limits = {tolerance_of(metric) for metric in lines} - {None}
        _center(differences, [row.diff for rows in lines.values() for row in rows], limits)
        for axis, wrong in ((values, lambda row: row.fp32 + row.amp), (differences, lambda row: row.diff)):
            # a gap alone is easy to overlook
            missing = [getattr(row, where) for rows in lines.values() for row in rows if not math.isfinite(wrong(row))]
            if missing:
                place = {"color": "tab:red", "transform": axis.get_xaxis_transform()}
                axis.plot(missing, [0.06] * len(missing), "x", label="NaN or inf", **place)
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)
            axis.legend(fontsize="small")
    for axis in axes[-1] if groups else ():
        axis.set_xlabel(where)
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _center(axis: Any, differences: Sequence[float], tolerances: set[Any]) -> None:
    """Put zero in the middle, and limit the axis: otherwise a large tolerance would flatten the differences."""
    largest = max((abs(value) for value in differences if math.isfinite(value)), default=0.0)
    near = [one for one in tolerances if one < 10 * largest or (not largest and math.isfinite(one))]
    height = 1.2 * max([largest, *near]) or 1.0
    axis.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
    for one in filter(math.isfinite, tolerances):
        axis.axhspan(-one, one, color="tab:green", alpha=0.12, zorder=0, label=f"tolerance {one:g}")
    axis.set_ylim(-height, height)
