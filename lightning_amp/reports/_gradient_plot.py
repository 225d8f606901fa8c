"""Draw the heat map of `GradientMonitor`: dangerous values in red, safe ones pale."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import final

from lightning_amp.findings import LOW_DB, GradientRow
from lightning_amp.reports._figures import new_figure, saved, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Quantity = Literal["headroom_bits", "underflow_fraction", "subnormal_fraction", "sqnr_db", "cosine"]


Stops = tuple[tuple[float, str], ...]
_SAFE, _PALE, _DARK_RED = "#f7fbff", "#fee6ce", "#67000d"
_SHARES: Stops = ((0.0, _SAFE), (0.01, _PALE), (0.1, "#fdae6b"), (0.3, "#de2d26"), (1.0, _DARK_RED))


@final
class _Style(NamedTuple):
    """How a quantity is drawn.

    A value has the same colour in every picture: pale if it is safe, dark red if it is worst. `stops` are values with
    their colours, from low to high. The colours between two stops are mixed.
    """

    title: str
    unit: str
    stops: Stops
    low_is_bad: bool


_STYLES: dict[Quantity, _Style] = {
    "headroom_bits": _Style(
        "Headroom in fp16: how often the loss scale could be doubled before a gradient overflows",
        "headroom [bits]\nred: overflows, white: just fits",
        ((-6.0, _DARK_RED), (0.0, "#ef3b2c"), (0.0, "#ffffff"), (16.0, "#c6dbef")),
        True,
    ),
    "underflow_fraction": _Style("Gradients that become zero in fp16", "share of the non-zero ones", _SHARES, False),
    "subnormal_fraction": _Style(
        "Gradients that become subnormal in fp16, and lose bits", "share of the non-zero ones", _SHARES, False
    ),
    "sqnr_db": _Style(
        "Mixed-precision gradient against fp32: signal to noise",
        "SQNR [dB]",
        ((0.0, _DARK_RED), (LOW_DB, "#de2d26"), (15.0, "#fdae6b"), (20.0, _PALE), (30.0, _SAFE)),
        True,
    ),
    "cosine": _Style(  # each cosine has the colour of the SQNR that corresponds to it
        "Mixed-precision gradient against fp32: cosine",
        "cosine",
        ((0.0, _DARK_RED), (0.95, "#de2d26"), (0.984, "#fdae6b"), (0.995, _PALE), (0.9995, _SAFE)),
        True,
    ),
}
QUANTITIES: tuple[Quantity, ...] = tuple(_STYLES)


@final
class _Mark(IntEnum):
    """The reason why a cell has no number. The legend explains the marks that occur."""

    ABSENT = 0
    ZERO = 1
    NOT_FINITE = 2
    EQUAL = 3


_Cell = float | _Mark
_HATCH: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.75", "hatch": "////"}
_MARKS: dict[_Mark, tuple[str, dict[str, Any]]] = {
    _Mark.ABSENT: ("no gradient in this step", _HATCH),
    _Mark.ZERO: ("all gradients are zero", {"facecolor": "0.8"}),
    _Mark.NOT_FINITE: ("not finite", {"facecolor": "black"}),
    _Mark.EQUAL: ("equal to fp32", {"facecolor": "#e5f5e0"}),
}


def draw_heat_map(
    samples: Sequence[Sequence[GradientRow]],
    quantity: Quantity,
    path: str | os.PathLike[str] | None,
    max_rows: int | None,
) -> Figure:
    """Return the figure of `GradientMonitor.plot`. The samples do not include the row for all gradients together."""
    style = _STYLES[quantity]
    steps = [sample[0].step for sample in samples if sample]
    grid = _grid(samples, quantity)
    names = _worst(grid, style.low_is_bad, max_rows)
    width = 8 + 0.07 * max((len(name) - 20 for name in names), default=0)
    figure = new_figure(max(width, 8), 2 + 0.25 * max(len(names), 4))
    axes: Any = figure.add_subplot()
    title = style.title if len(names) == len(grid) else f"{style.title}\nthe {len(names)} worst of {len(grid)} rows"
    axes.set_title(title, fontsize="medium")
    if names:
        _fill(figure, axes, [grid[name] for name in names], quantity)
        axes.set_xlabel("optimizer step")
        axes.set_yticks(range(len(names)), names, fontsize="small")
        every = math.ceil(len(steps) / 8)
        axes.set_xticks(range(0, len(steps), every), [f"{step:,}" for step in steps[::every]])
    else:
        say_empty(axes, "no sample yet")
    return saved(figure, path)


def _grid(samples: Sequence[Sequence[GradientRow]], quantity: Quantity) -> dict[str, list[_Cell]]:
    """Return one cell per sample for each name: a float, or a mark (an int) where there is no number."""
    names = dict.fromkeys(row.name for sample in samples for row in sample)
    grid: dict[str, list[_Cell]] = {name: [_Mark.ABSENT] * len(samples) for name in names}
    for column, sample in enumerate(samples):
        for row in sample:
            grid[row.name][column] = _cell(row, quantity)
    return grid


def _cell(row: GradientRow, quantity: Quantity) -> _Cell:
    value: float = getattr(row, quantity)
    if row.largest == 0:
        return _Mark.ZERO
    if quantity == "sqnr_db" and value == math.inf:
        return _Mark.EQUAL
    return float(value) if math.isfinite(value) else _Mark.NOT_FINITE


def _worst(grid: dict[str, list[_Cell]], low_is_bad: bool, max_rows: int | None) -> list[str]:
    """Return the names of the worst rows, in the order of the modules."""

    def badness(name: str) -> float:
        cells = grid[name]
        values = [-cell if low_is_bad else cell for cell in cells if not isinstance(cell, _Mark)]
        return math.inf if _Mark.NOT_FINITE in _marks(cells) else max(values, default=-math.inf)

    chosen = set(sorted(grid, key=badness, reverse=True)[:max_rows])
    return [name for name in grid if name in chosen]


def _marks(cells: Sequence[_Cell]) -> set[_Mark]:
    return {cell for cell in cells if isinstance(cell, _Mark)}


def _fill(figure: Figure, axes: Any, grid: list[list[_Cell]], quantity: Quantity) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    values = [[math.nan if isinstance(cell, _Mark) else cell for cell in row] for row in grid]
    finite = [cell for row in values for cell in row if not math.isnan(cell)]
    marks = sorted(set().union(*(_marks(row) for row in grid)))
    if finite:
        _fill_values(figure, axes, values, finite, quantity)
    if marks:
        axes.patch.set(**_HATCH)  # the background, visible where no cell is drawn
        drawn = [[cell if isinstance(cell, _Mark) and cell else math.nan for cell in row] for row in grid]
        colors = ListedColormap([patch["facecolor"] for _, patch in _MARKS.values()])
        axes.imshow(drawn, aspect="auto", interpolation="nearest", cmap=colors, vmin=-0.5, vmax=len(_MARKS) - 0.5)
        patches = [Patch(label=_MARKS[mark][0], **_MARKS[mark][1]) for mark in marks]
        figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize="small", frameon=False)


def _fill_values(figure: Figure, axes: Any, values: list[list[float]], finite: list[float], quantity: Quantity) -> None:
    from matplotlib.ticker import PercentFormatter

    low, high = _limits(quantity, min(finite), max(finite))
    beyond = {(True, True): "both", (True, False): "min", (False, True): "max"}
    style = _STYLES[quantity]
    colors = _colors(style.stops, low, high)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colors, vmin=low, vmax=high)
    extend = beyond.get((min(finite) < low, max(finite) > high), "neither")
    bar = figure.colorbar(image, ax=axes, extend=extend)
    bar.set_label(style.unit, fontsize="small")
    if quantity.endswith("fraction"):
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1))


def _colors(stops: Stops, low: float, high: float) -> Any:
    """Return the colour map from `low` to `high`. Values beyond the outermost stops have the colours of those stops."""
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    number, first, extent = 1024, stops[0][0], stops[-1][0] - stops[0][0]
    whole = LinearSegmentedColormap.from_list("", [((stop - first) / extent, color) for stop, color in stops], N=8192)
    values = [low + (high - low) * (i + 0.5) / number for i in range(number)]
    return ListedColormap(whole([(value - first) / extent for value in values]))


def _limits(quantity: Quantity, lowest: float, highest: float) -> tuple[float, float]:
    """Return the ends of the colour bar: round numbers, not closer together than differences that matter."""
    if quantity == "headroom_bits":  # 16 bits of headroom are as good as 30
        end = min(max(4.0, abs(lowest), abs(highest)), 16.0)
        return -end, end
    if quantity == "sqnr_db":
        low = 10 * math.floor(lowest / 10)
        return low, max(10 * math.ceil(highest / 10), low + 10)
    if quantity == "cosine":
        return next((bound for bound in (0.99, 0.9, 0.0) if lowest >= bound), -1.0), 1.0
    return 0.0, next((bound for bound in (0.01, 0.1) if highest <= bound), 1.0)
