"""Draw the loss scale over the steps of one run or several."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from lightning_amp._text import alike
from lightning_amp.findings import StepReason, StepRecord
from lightning_amp.reports._figures import COLORS, new_figure, saved, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MANY = 100
"""Above this number of marks, they are drawn small, because large marks would hide the line."""

_NO_STEP = "no optimizer step was taken"

_SKIP_MARKS: tuple[tuple[StepReason, str, str], ...] = (
    ("gradient", "v", "skipped: gradients overflowed"),
    ("loss", "x", "skipped: loss was not finite"),
)

Records = Sequence[StepRecord]
"""The steps of a run as :class:`ScaleHistory` stores them.

The steps between two records have the scale of the later record.
"""


def plot_histories(
    histories: Mapping[str, Records], path: str | os.PathLike[str] | None = None, *, title: str = "Loss scale"
) -> Figure:
    """Draw runs into one picture. Each run and its skips have their own colour; the legend has the names of the runs.

    Args:
        histories: The steps of each run, by its name.
        path: Path or URL to also save the picture to.
        title: The title of the picture; a long one is wrapped.
    """
    figure = new_figure(8, 3.6 + 0.12 * len(histories))
    axes: Any = figure.add_subplot()
    marks: dict[str, str] = {}
    for (name, records), color in zip(histories.items(), cycle(COLORS), strict=False):
        if not records:
            axes.plot([], [], color=color, label=f"{name}: {_NO_STEP}")
            continue
        attempted, num_skipped = records[-1].index - records[0].index + 1, sum(record.skipped for record in records)
        _curve(axes, records, color=color, label=f"{name}: {num_skipped:,} of {attempted:,} steps skipped")
        for reason, marker, label in _SKIP_MARKS:
            skipped = [record for record in records if record.skipped and record.reason == reason]
            if skipped:
                marks[label] = marker
                x, y = [record.index for record in skipped], [record.scale for record in skipped]
                size = 6 if len(skipped) <= _MANY else 2
                axes.plot(x, y, linestyle="none", marker=marker, markersize=size, color=color)
    for label, marker in marks.items():
        axes.plot([], [], linestyle="none", marker=marker, markersize=4, color="gray", label=label)
    if any(histories.values()):
        _finish(figure, axes, [record for run in histories.values() for record in run])
    else:
        say_empty(axes, _NO_STEP)
    axes.set_xlabel("optimizer steps attempted")
    axes.set_ylabel("loss scale")
    axes.set_title(textwrap.fill(title, 90, break_on_hyphens=False), fontsize="medium")
    return saved(figure, path)


def _curve(axes: Any, records: Records, **style: Any) -> None:
    steps: list[float] = []
    scales: list[float] = []
    for record in records:
        steps += [record.index, record.index + 1, record.index + 1]
        scales += [record.scale, record.scale, record.next_scale]
    axes.plot(steps, scales, **style)


def _finish(figure: Figure, axes: Any, records: Records) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_yscale("log", base=2)
    write = alike(scale for record in records for scale in (record.scale, record.next_scale))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: write(scale)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    columns = 2 if max(map(len, axes.get_legend_handles_labels()[1])) < 60 else 1
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small", markerscale=1.5, frameon=False)
