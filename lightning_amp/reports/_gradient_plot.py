"""Draw the heat map of `GradientMonitor`: dangerous values in red, safe ones pale."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning_amp.findings import GradientRow
from lightning_amp.reports._figures import new_figure, saved, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Quantity = Literal["headroom_bits", "underflow_fraction", "subnormal_fraction", "sqnr_db", "cosine"]

# The title of each quantity, the name of its values, and its worst and its best value. A value has the same colour in
# every picture.
_QUANTITIES: dict[Quantity, tuple[str, str, float, float]] = {
    "headroom_bits": ("Headroom in fp16: doublings of the loss scale until a gradient overflows", "bits", -1.0, 1.0),
    "underflow_fraction": ("Gradients that become zero in fp16", "share of the non-zero ones", 0.5, 0.0),
    "subnormal_fraction": ("Gradients that lose bits in fp16", "share of the non-zero ones", 0.5, 0.0),
    "sqnr_db": ("Mixed-precision gradient against fp32", "SQNR [dB]; 6 dB are one bit", 0.0, 40.0),
    "cosine": ("Mixed-precision gradient against fp32", "cosine", 0.9, 1.0),
}
QUANTITIES: tuple[Quantity, ...] = tuple(_QUANTITIES)
_MAX_NUMBERS = 20  # columns in which numbers have room
_COLORS = ("#67000d", "#de2d26", "#fdae6b", "#fee6ce", "#f7fbff")  # from the worst to the best
_MARKS = {"no gradient": "0.9", "all zero": "0.7", "not finite": "black", "equal to fp32": "#e5f5e0"}


def draw_heat_map(
    samples: Sequence[Sequence[GradientRow]],
    quantity: Quantity,
    worst: Collection[str],
    path: str | os.PathLike[str] | None,
) -> Figure:
    """Return the figure of `GradientMonitor.plot`: these rows of the samples, without the row for all gradients."""
    known = dict.fromkeys(row.name for sample in samples for row in sample)
    names = [name for name in known if name in worst]
    figure = new_figure(
        8 + 0.07 * max((len(name) - 20 for name in names if len(name) > 20), default=0), 3 + 0.25 * len(names)
    )
    axes: Any = figure.add_subplot()
    title = _QUANTITIES[quantity][0]
    axes.set_title(title if len(names) == len(known) else f"{title}\nthe {len(names)} worst of {len(known)} rows")
    if not names:
        say_empty(axes, "no sample yet")
        return saved(figure, path)
    columns = [{row.name: row for row in sample} for sample in samples]
    _fill(figure, axes, [[_cell(column.get(name), quantity) for column in columns] for name in names], quantity)
    axes.set_xlabel("optimizer step")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    every = math.ceil(len(samples) / 8)
    axes.set_xticks(range(0, len(samples), every), [f"{sample[0].step:,}" for sample in samples[::every]])
    return saved(figure, path)


def _cell(row: GradientRow | None, quantity: Quantity) -> float | str:
    """Return the value of a row, or the name of a mark where there is no number."""
    if row is None or row.largest == 0:
        return "no gradient" if row is None else "all zero"
    value: float = getattr(row, quantity)
    if math.isinf(value) and value > 0 and quantity == "sqnr_db":
        return "equal to fp32"
    return value if math.isfinite(value) else "not finite"


def _fill(figure: Figure, axes: Any, grid: list[list[float | str]], quantity: Quantity) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
    from matplotlib.patches import Patch

    _, unit, worst, best = _QUANTITIES[quantity]
    scale = Normalize(min(worst, best), max(worst, best))
    colors = LinearSegmentedColormap.from_list("", _COLORS if worst < best else _COLORS[::-1])
    pixels = [[to_rgba(_MARKS[one]) if isinstance(one, str) else colors(scale(one)) for one in row] for row in grid]
    axes.imshow(pixels, aspect="auto", interpolation="nearest")
    if max(map(len, grid)) <= _MAX_NUMBERS:  # the colours tell only good from bad
        numbers = [(x, y, one) for y, row in enumerate(grid) for x, one in enumerate(row) if not isinstance(one, str)]
        for x, y, one in numbers:
            ink = "black" if sum(pixels[y][x][:3]) > 1.5 else "white"
            axes.text(x, y, f"{one:.2g}", ha="center", va="center", fontsize="small", color=ink)
    figure.colorbar(ScalarMappable(scale, colors), ax=axes, extend="both").set_label(unit, fontsize="small")
    found = {one for row in grid for one in row}
    marks = [Patch(label=name, color=color) for name, color in _MARKS.items() if name in found]
    if marks:
        figure.legend(handles=marks, loc="outside lower right", ncols=len(marks), fontsize="small", frameon=False)
