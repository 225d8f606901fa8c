"""Pictures; the only place of this layer that knows matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_amp.scaling._history import ScaleHistory


def plot_history(history: ScaleHistory, path: str | os.PathLike[str] | None = None) -> Figure:
    """See :meth:`ScaleHistory.plot`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Plotting needs matplotlib, which is not installed. Run `pip install matplotlib`."
        ) from error
    figure = Figure(figsize=(8, 3.2), layout="constrained")  # no pyplot: its global state is the user's
    axes = figure.add_subplot()
    records = list(history)
    # Steps at which nothing changed are not stored; each record tells the scale before and after its own step.
    axes.plot(
        [step for r in records for step in (r.index, r.index + 1, r.index + 1)],
        [scale for r in records for scale in (r.scale, r.scale, r.next_scale)],
        color="tab:blue",
        label="loss scale",
    )
    for label, marker, color, wanted in (
        ("skipped: gradients overflowed", "v", "tab:red", [r for r in records if r.skipped and r.reason == "gradient"]),
        ("skipped: loss was not finite", "x", "black", [r for r in records if r.skipped and r.reason == "loss"]),
        ("scale grew", "^", "tab:green", [r for r in records if r.next_scale > r.scale]),
    ):
        if wanted:
            axes.plot(
                [r.index for r in wanted],
                [r.scale for r in wanted],
                linestyle="none",
                marker=marker,
                color=color,
                label=f"{label} ({len(wanted):,})",
            )
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer steps attempted")
    axes.set_ylabel("loss scale")
    axes.set_title(history.summary(), fontsize="medium")
    if records:
        axes.legend(fontsize="small")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
