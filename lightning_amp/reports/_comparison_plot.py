"""The picture of a comparison: how large each metric is, and beside it what mixed precision costs in it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_amp.findings import ComparisonRow
from lightning_amp.reports._figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = Mapping[str, Sequence[ComparisonRow]]

# The two lines nearly coincide: one is seen through the other.
_AMP: dict[str, Any] = {"marker": ".", "linewidth": 1}
_FP32: dict[str, Any] = {"marker": "o", "markersize": 7, "markeredgewidth": 0, "linewidth": 4, "alpha": 0.35}


def plot_comparison(
    groups: Mapping[str, Lines], tolerance_of: Callable[[str], float | None], left_out: str = ""
) -> Figure:
    """Draw two panels for each group: values of both sides, and their difference.

    Args:
        groups: By metric, what to draw: one line per loader.
        tolerance_of: The tolerance that applies to a line, if any.
        left_out: Said at the top.
    """
    number = max(len(groups), 1)
    figure = new_figure(10.0, 0.6 + 2.0 * number)
    if left_out:
        figure.suptitle(left_out, fontsize="medium")
    axes: Any = figure.subplots(number, 2, sharex=True, squeeze=False)
    label, place = _horizontal(groups)
    for (sizes, differences), (group, lines) in zip(axes, groups.items(), strict=False):
        for i, (metric, rows) in enumerate(lines.items()):
            where = [place(row) for row in rows]
            name = metric.removeprefix(group).lstrip("/").replace("dataloader_idx_", "loader ")
            color = f"C{i % 10}"
            amp, fp32 = (
                style | ({"marker": ""} if len(rows) > 50 else {}) | {"color": color} for style in (_AMP, _FP32)
            )
            sizes.plot(where, [_drawn(row.fp32) for row in rows], **fp32)
            sizes.plot(where, [_drawn(row.amp) for row in rows], label=name, **amp)
            differences.plot(where, [_drawn(row.diff) for row in rows], **amp)
        _mark_non_finite(sizes, [(place(r), r.amp if math.isfinite(r.fp32) else r.fp32) for r in _all_rows(lines)])
        _mark_non_finite(differences, [(place(r), r.diff) for r in _all_rows(lines)])
        _scale_values(sizes, lines)
        _scale_differences(differences, lines, {t for metric in lines if (t := tolerance_of(metric)) is not None})
        sizes.set_ylabel(_in_lines(group))
        if len(lines) > 1:
            sizes.legend(fontsize="small")
    if groups:
        from matplotlib.lines import Line2D

        keys = [Line2D([], [], color="0.3", **_AMP), Line2D([], [], color="0.3", **_FP32)]
        figure.legend(keys, ["AMP", "fp32"], loc="outside upper left", ncols=2, fontsize="small")
    axes[0, 0].set_title("value")
    axes[0, 1].set_title("AMP - fp32")
    _ticks(axes, label, sorted({place(row) for lines in groups.values() for row in _all_rows(lines)}))
    return figure


def _all_rows(lines: Lines) -> list[ComparisonRow]:
    return [row for rows in lines.values() for row in rows]


def _horizontal(groups: Mapping[str, Lines]) -> tuple[str, Callable[[ComparisonRow], float]]:
    """Choose epochs, or steps where an epoch has several comparisons."""
    several = any(len({row.epoch for row in rows}) < len(rows) for lines in groups.values() for rows in lines.values())
    return ("step", lambda row: row.step) if several else ("epoch", lambda row: row.epoch)


def _drawn(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _mark_non_finite(axis: Any, points: list[tuple[float, float]]) -> None:
    """Mark what is not finite: gaps alone would be overlooked."""
    where = sorted({x for x, value in points if not math.isfinite(value)})
    if where:
        axis.plot(
            where, [0.06] * len(where), "x", color="tab:red", transform=axis.get_xaxis_transform(), label="NaN or inf"
        )
        axis.legend(fontsize="small")


def _scale_values(axis: Any, lines: Lines) -> None:
    """Show not less than a tenth of the values: this panel is about their size."""
    values = [value for row in _all_rows(lines) for value in (row.amp, row.fp32) if math.isfinite(value)]
    if values:
        low, high = min(values), max(values)
        room = max(0.1 * (high - low), 0.05 * max(abs(low), abs(high))) or 1.0
        axis.set_ylim(low - room, high + room)
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)


def _scale_differences(axis: Any, lines: Lines, tolerances: set[float]) -> None:
    """Put zero in the middle and keep differences readable: a tolerance far beyond them must not flatten them."""
    largest = max((abs(row.diff) for row in _all_rows(lines) if math.isfinite(row.diff)), default=0.0)
    finite = sorted(tolerance for tolerance in tolerances if math.isfinite(tolerance))
    near = [tolerance for tolerance in finite if tolerance < 10 * largest or not largest]
    height = 1.2 * max([largest, *near])
    axis.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
    for tolerance in finite:
        label = f"tolerance {tolerance:g}" + ("" if tolerance in near else " (beyond this panel)")
        axis.axhspan(-tolerance, tolerance, color="tab:green", alpha=0.12, zorder=0, label=label)
    axis.set_ylim(-(height or 1.0), height or 1.0)
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)
    if not height:
        axis.set_yticks([0.0])
    if finite:
        axis.legend(fontsize="small")


def _in_lines(name: str, length: int = 22) -> str:
    """Break a long name at its separators, to fit beside a panel."""
    lines = [""]
    for part in re.split(r"(?<=[._/])", name):
        if lines[-1] and len(lines[-1]) + len(part) > length:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _ticks(axes: Any, label: str, places: list[float]) -> None:
    for axis in axes[-1]:
        axis.set_xlabel(label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(places) == 1:
        axes[0, 0].set_xlim(places[0] - 0.5, places[0] + 0.5)
        for axis in axes[-1]:
            axis.set_xticks(places)
