"""Make and save figures. Only this file imports matplotlib's figure, because matplotlib is optional."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from lightning_amp._files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""The colours of lines in all pictures; people with colour blindness can tell them apart."""


def new_figure(width: float, height: float) -> Figure:
    """Make a figure, sized in inches. It does not use pyplot, whose global state belongs to the user."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Plotting needs matplotlib, which is not installed. Run `pip install matplotlib`."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def say_empty(axes: Any, text: str) -> None:
    """Write `text` into axes that have no data to draw."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


def saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Save a figure in the format of the suffix if there is a path or URL, and return the figure."""
    if path is not None:
        suffix = PurePosixPath(str(path)).suffix[1:] or None
        write_atomically(path, lambda file: figure.savefig(file, format=suffix, dpi=120), mode="binary")
    return figure
