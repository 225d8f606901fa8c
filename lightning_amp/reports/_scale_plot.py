"""The picture of a loss scale over the steps of a run."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any

from lightning_amp.reports._figures import new_figure, saved, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_amp.reports._scale_history import ScaleHistory


def plot_history(history: ScaleHistory, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw what :meth:`ScaleHistory.plot` returns."""
    figure = new_figure(8, 3.6)
    axes: Any = figure.add_subplot()
    if history.last is None:
        say_empty(axes, "no optimizer step was taken")
    else:
        _draw(figure, axes, history)
    axes.set_xlabel("optimizer steps attempted")
    axes.set_ylabel("loss scale")
    axes.set_title(textwrap.fill(f"Loss scale: {history.summary()}", 90, break_on_hyphens=False), fontsize="medium")
    return saved(figure, path)


def _draw(figure: Figure, axes: Any, history: ScaleHistory) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    records = list(history)
    # Steps at which nothing changed are not stored; each record tells the scale before and after its own step.
    steps = [step for r in records for step in (r.index, r.index + 1, r.index + 1)]
    scales = [scale for r in records for scale in (r.scale, r.scale, r.next_scale)]
    axes.plot(steps, scales, color="#0072b2", label="loss scale")
    many = 100  # marks: from here on they are small, or would hide the line that they stand on
    grown = [r for r in records if r.next_scale > r.scale]
    for label, marker, color, wanted in (
        ("skipped: gradients overflowed", "v", "#d55e00", [r for r in records if r.skipped and r.reason == "gradient"]),
        ("skipped: loss was not finite", "x", "black", [r for r in records if r.skipped and r.reason == "loss"]),
        ("scale grew", "^", "#009e73", grown if len(grown) <= many else []),
    ):
        if wanted:
            axes.plot(
                [r.index for r in wanted],
                [r.scale for r in wanted],
                linestyle="none",
                marker=marker,
                markersize=6 if len(wanted) <= many else 2,
                color=color,
                label=f"{label} ({len(wanted):,})",
            )
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", markerscale=1.5, frameon=False)
