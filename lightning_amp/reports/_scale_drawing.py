"""Draw the loss scale over the steps of one run or several: as a picture, and as text for a terminal."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import final

from lightning_amp._text import alike, counted
from lightning_amp.findings import StepReason, StepRecord, describe_fallbacks, fallbacks
from lightning_amp.reports._figures import new_figure, saved, say_empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MANY = 100
"""From this number of marks on, they are drawn small, because large marks would hide the line."""

_NO_STEP = "no optimizer step was taken"

Records = Sequence[StepRecord]
"""The steps of a run as :class:`ScaleHistory` stores them.

The steps between two records have the scale of the later record.
"""


class _Replay(Protocol):
    """The two runs of a :class:`PolicyReplay`.

    They are a protocol here, because the file of that class imports this file.
    """

    @property
    def optimistic(self) -> Records: ...
    @property
    def pessimistic(self) -> Records: ...


def _by_precision(records: Records) -> list[list[StepRecord]]:
    """Split a run where its precision changed: the scale ends there, so no line may cross that step."""
    changes = {record.index for record in fallbacks(records)}
    parts: list[list[StepRecord]] = []
    for record in records:
        if not parts or record.index in changes:
            parts.append([])
        parts[-1].append(record)
    return parts


def _skips(records: Records, reason: StepReason) -> list[StepRecord]:
    return [record for record in records if record.skipped and record.reason == reason]


# -- pictures ----------------------------------------------------------------------------------------------------------

_SKIP_MARKS: tuple[tuple[StepReason, str, str, str], ...] = (
    ("gradient", "v", _COLORS[1], "skipped: gradients overflowed"),
    ("loss", "x", "black", "skipped: loss was not finite"),
)


def plot_history(records: Records, summary: str, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw one run, with `summary` as its title, for :meth:`ScaleHistory.plot`."""
    figure = new_figure(8, 3.6)
    axes: Any = figure.add_subplot()
    if records:
        _curve(axes, records, color=_COLORS[0], label="loss scale")
        for reason, marker, color, label in _SKIP_MARKS:
            skipped = _skips(records, reason)
            _mark(axes, skipped, marker, color, f"{label} ({len(skipped):,})")
        grown = [record for record in records if record.next_scale > record.scale]
        if len(grown) <= _MANY:
            _mark(axes, grown, "^", _COLORS[2], f"scale grew ({len(grown):,})")
        for record in fallbacks(records):
            _mark_fallback(axes, record, "gray", _fallback(record))
        _finish(figure, axes, records)
    else:
        say_empty(axes, _NO_STEP)
    return _titled(figure, axes, textwrap.fill(f"Loss scale: {summary}", 90, break_on_hyphens=False), path)


def plot_histories(
    histories: Mapping[str, Records],
    path: str | os.PathLike[str] | None = None,
    *,
    replays: Mapping[str, _Replay] | None = None,
) -> Figure:
    """Draw several runs into one picture. Each run and its skips have their own colour.

    The legend has the names of the runs. The optimistic run of a replay is dashed, and its pessimistic run is dotted.
    """
    figure = new_figure(8, 3.6 + 0.12 * len(histories))
    axes: Any = figure.add_subplot()
    marks: dict[str, str] = {}
    for (name, records), color in zip(histories.items(), cycle(_COLORS), strict=False):
        if not records:
            axes.plot([], [], color=color, label=f"{name}: {_NO_STEP}")
            continue
        for record in fallbacks(records):
            _mark_fallback(axes, record, color)
        attempted, num_skipped = records[-1].index - records[0].index + 1, sum(record.skipped for record in records)
        skipped = f"{num_skipped:,} of {attempted:,} steps skipped{describe_fallbacks(records)}"
        _curve(axes, records, color=color, label=f"{name}: {skipped}")
        for reason, marker, _, label in _SKIP_MARKS:
            if _mark(axes, _skips(records, reason), marker, color):
                marks[label] = marker
        if replays and name in replays:
            _curve(axes, replays[name].optimistic, color=color, linestyle="--", linewidth=1)
            _curve(axes, replays[name].pessimistic, color=color, linestyle=":", linewidth=1)
    for label, marker in marks.items():
        axes.plot([], [], linestyle="none", marker=marker, markersize=4, color="gray", label=label)
    for label, linestyle in (("replayed: no undecided step overflows", "--"), ("replayed: all of them do", ":")):
        if replays:
            axes.plot([], [], linestyle=linestyle, linewidth=1, color="gray", label=label)
    if any(histories.values()):
        longest = max(len(text) for text in axes.get_legend_handles_labels()[1])
        records = [record for run in histories.values() for record in run]
        _finish(figure, axes, records, columns=2 if longest < 60 else 1)
    else:
        say_empty(axes, _NO_STEP)
    return _titled(figure, axes, "Loss scale", path)


def _curve(axes: Any, records: Records, **style: Any) -> None:
    steps: list[float] = []
    scales: list[float] = []
    for part in _by_precision(records):
        if steps:
            steps.append(part[0].index)
            scales.append(math.nan)  # a gap in the line
        for record in part:
            steps += [record.index, record.index + 1, record.index + 1]
            scales += [record.scale, record.scale, record.next_scale]
    axes.plot(steps, scales, **style)


def _mark(axes: Any, records: Records, marker: str, color: str, label: str | None = None) -> bool:
    """Mark some steps; return whether there were any skips."""
    size = 6 if len(records) <= _MANY else 2
    x, y = [record.index for record in records], [record.scale for record in records]
    if records:
        axes.plot(x, y, linestyle="none", marker=marker, markersize=size, color=color, label=label)
    return bool(records)


def _mark_fallback(axes: Any, record: StepRecord, color: str, label: str | None = None) -> None:
    axes.axvline(record.index, linestyle="-.", linewidth=1.2, color=color, label=label)


def _finish(figure: Figure, axes: Any, records: Records, columns: int = 4) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_yscale("log", base=2)
    write = alike(scale for record in records for scale in (record.scale, record.next_scale))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: write(scale)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small", markerscale=1.5, frameon=False)


def _titled(figure: Figure, axes: Any, title: str, path: str | os.PathLike[str] | None) -> Figure:
    axes.set_xlabel("optimizer steps attempted")
    axes.set_ylabel("loss scale")
    axes.set_title(title, fontsize="medium")
    return saved(figure, path)


def _fallback(record: StepRecord) -> str:
    return f"{record.precision} from step {record.index:,} on"


# -- text --------------------------------------------------------------------------------------------------------------

GRADIENT, LOSS, BOTH, FALLBACK = "v", "x", "*", ">"


def scale_chart(records: Records, width: int = 80, height: int = 10) -> str:
    """Draw log2 of the scale over steps as lines of text, with a mark below each place where steps were skipped.

    A line has `width` characters, at least 30. The curve has at most `height` lines, fewer if the scale moved less.
    """
    if not records:
        return "no optimizer step was recorded"
    # the exponent at which a scale of 0 is drawn
    floor = min((math.log2(r.scale) for r in records if r.scale > 0), default=0.0) - 1
    exponents = [math.log2(record.scale) if record.scale > 0 else floor for record in records]
    rows = _Rows(exponents, max(height, 2))
    labels = rows.labels
    if any(record.scale == 0 for record in records):
        labels[-1] = "0"
    margin = max(map(len, labels)) + 2
    columns = _Columns(records[0].index, records[-1].index, max(width, 30) - margin)
    lines = [[" "] * columns.number for _ in labels]
    remaining = iter(exponents)
    for part in _by_precision(records):
        drawn: list[list[float]] = [[] for _ in range(columns.number)]
        begin = part[0].index
        for record in part:
            exponent = next(remaining)
            for column in columns.of(begin, record.index):
                drawn[column].append(exponent)
            begin = record.index + 1
        for column, values in enumerate(drawn):
            if values:
                low, high = rows.row(min(values)), rows.row(max(values))
                for row in range(high, low + 1):  # the first line is the highest
                    lines[row][column] = "-" if low == high else "|"
    text = [f"{label:>{margin - 2}} |{''.join(line)}" for label, line in zip(labels, lines, strict=True)]
    marks = _marks(records, columns)
    if marks.strip():
        text.append(f"{'|':>{margin}}{marks}")
    text.append(" " * margin + _axis(records[0].index, records[-1].index, columns.number))
    if legend := _legend(records):
        text.append(legend)
    return "\n".join(line.rstrip() for line in text)


@final
class _Columns:
    """The columns of the text: each stands for many steps, or for a part of one."""

    def __init__(self, first: int, last: int, number: int) -> None:
        self.number = number
        self._first, self._steps = first, last - first + 1

    def of(self, first: int, last: int) -> range:
        """Return the columns of the steps from `first` to `last`, at least one."""
        begin, of_last, end = ((s - self._first) * self.number // self._steps for s in (first, last, last + 1))
        return range(begin, max(end, of_last + 1))


@final
class _Rows:
    """Lines for exponents, the highest first: one for each power of two.

    If that would be more than `most` lines, there is one for every second power, or every third, and so on.
    """

    def __init__(self, exponents: Sequence[float], most: int) -> None:
        low, high = min(exponents), max(exponents)
        self._step = max(1, math.ceil((math.ceil(high) - math.floor(low)) / (most - 1)))
        self._top = math.floor(high / self._step + 0.5) * self._step
        scales = [2.0 ** (self._top - row * self._step) for row in range(self.row(low) + 1)]
        self.labels = [*map(alike(scales), scales)]

    def row(self, exponent: float) -> int:
        """Return the line that is nearest to an exponent."""
        return max(0, math.floor((self._top - exponent) / self._step + 0.5))


def _marks(records: Records, columns: _Columns) -> str:
    marks = [" "] * columns.number
    for record in records:
        if record.skipped:
            mark = LOSS if record.reason == "loss" else GRADIENT
            column = columns.of(record.index, record.index)[0]
            marks[column] = mark if marks[column] in (" ", mark) else BOTH
    for record in fallbacks(records):
        marks[columns.of(record.index, record.index)[0]] = FALLBACK
    return "".join(marks)


def _axis(first: int, last: int, width: int) -> str:
    """Write the first and the last step below the ends of the curve."""
    begin, name, end = f"{first:,}", "optimizer steps attempted", f"{last:,}"
    room = width - len(begin) - len(end)
    return f"{begin}{name.center(room) if room > len(name) + 1 else ' ' * max(room, 1)}{end}"


def _legend(records: Records) -> str:
    losses = len(_skips(records, "loss"))
    gradients = sum(record.skipped for record in records) - losses
    parts = [
        f"{mark} {counted(number, 'step')} {what}"
        for mark, number, what in ((GRADIENT, gradients, "overflowed"), (LOSS, losses, "had a non-finite loss"))
        if number
    ]
    skipped = ["skipped: " + ", ".join(parts)] if parts else []
    return "; ".join([*skipped, *(f"{FALLBACK} {_fallback(record)}" for record in fallbacks(records))])
