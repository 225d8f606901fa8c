"""The curve of a loss scale in plain characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import final

from lightning_amp._text import counted, exact

if TYPE_CHECKING:
    from lightning_amp.reports._scale_history import ScaleHistory

GRADIENT, LOSS, BOTH, FALLBACK = "v", "x", "*", ">"


@final
class _Stretch(NamedTuple):
    """Steps in a row at one scale; `exponent` is its binary logarithm."""

    first: int
    last: int
    exponent: float


def scale_chart(history: ScaleHistory, width: int = 80, height: int = 10) -> str:
    """Draw log2 of the scale over steps as lines of text, with a mark below each place where steps were skipped.

    Args:
        history: What is drawn.
        width: Of a line, in characters; at least 30.
        height: Lines for the curve; at least 2. It takes fewer where the scale moved less.

    """
    first, last = history.first, history.last
    if first is None or last is None:
        return "no optimizer step was recorded"
    stretches = list(_stretches(history))
    rows = _Rows([stretch.exponent for stretch in stretches], max(height, 2))
    labels = rows.labels
    if any(record.scale == 0 for record in history):
        labels[-1] = "0"
    margin = max(map(len, labels)) + 2
    columns = _Columns(first.index, last.index, max(width, 30) - margin)
    lines = [[" "] * columns.number for _ in labels]
    starts = [stretches[0].first, *(record.index for record in history.fallbacks), last.index + 1]
    for begin, end in pairwise(starts):  # no line leads from one precision to the next: the scale did not move
        part = [stretch for stretch in stretches if begin <= stretch.first < end]
        for column, exponents in enumerate(_by_column(part, columns)):
            if exponents:
                low, high = rows.row(min(exponents)), rows.row(max(exponents))
                for row in range(high, low + 1):  # the first line is the highest
                    lines[row][column] = "-" if low == high else "|"
    text = [f"{label:>{margin - 2}} |{''.join(line)}" for label, line in zip(labels, lines, strict=True)]
    marks = _marks(history, columns)
    if marks.strip():
        text.append(f"{'|':>{margin}}{marks}")
    text.append(" " * margin + _axis(first.index, last.index, columns.number))
    legend = _legend(history)
    return "\n".join(line.rstrip() for line in [*text, *([legend] if legend else [])])


def _stretches(history: ScaleHistory) -> Iterator[_Stretch]:
    """Iterate over the steps; those that are not stored were taken at the scale of the next that is."""
    records = list(history)
    floor = min((math.log2(r.scale) for r in records if r.scale > 0), default=0.0) - 1
    begin = records[0].index
    for record in records:
        yield _Stretch(begin, record.index, math.log2(record.scale) if record.scale > 0 else floor)
        begin = record.index + 1


@final
class _Columns:
    """Which steps a column stands for: many, or a part of one."""

    def __init__(self, first: int, last: int, number: int) -> None:
        self.number = number
        self._first, self._steps = first, last - first + 1

    def of(self, first: int, last: int) -> range:
        """Return the columns of some steps in a row, at least one."""
        begin, of_last, end = ((s - self._first) * self.number // self._steps for s in (first, last, last + 1))
        return range(begin, max(end, of_last + 1))


def _by_column(stretches: Sequence[_Stretch], columns: _Columns) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in range(columns.number)]
    for stretch in stretches:
        for column in columns.of(stretch.first, stretch.last):
            found[column].append(stretch.exponent)
    return found


@final
class _Rows:
    """Lines for exponents, the highest first: one for each power of two, or for every second, ... if `most` is less."""

    def __init__(self, exponents: Sequence[float], most: int) -> None:
        low, high = min(exponents), max(exponents)
        self._step = max(1, math.ceil((math.ceil(high) - math.floor(low)) / (most - 1)))
        self._top = math.floor(high / self._step + 0.5) * self._step
        self._number = self.row(low) + 1

    @property
    def labels(self) -> list[str]:
        """Return the scale at each line."""
        return [exact(2.0 ** (self._top - row * self._step)) for row in range(self._number)]

    def row(self, exponent: float) -> int:
        """Return the line that is nearest to an exponent."""
        return max(0, math.floor((self._top - exponent) / self._step + 0.5))


def _marks(history: ScaleHistory, columns: _Columns) -> str:
    marks = [" "] * columns.number
    for record in history:
        if record.skipped:
            mark = LOSS if record.reason == "loss" else GRADIENT
            column = columns.of(record.index, record.index)[0]
            marks[column] = mark if marks[column] in (" ", mark) else BOTH
    for record in history.fallbacks:
        marks[columns.of(record.index, record.index)[0]] = FALLBACK
    return "".join(marks)


def _axis(first: int, last: int, width: int) -> str:
    """Write the first and the last step below the ends of the curve."""
    begin, name, end = f"{first:,}", "optimizer steps attempted", f"{last:,}"
    room = width - len(begin) - len(end)
    return f"{begin}{name.center(room) if room > len(name) + 1 else ' ' * max(room, 1)}{end}"


def _legend(history: ScaleHistory) -> str:
    losses = sum(record.skipped and record.reason == "loss" for record in history)
    gradients = history.num_skipped - losses
    parts = [
        f"{mark} {counted(number, 'step')} {what}"
        for mark, number, what in ((GRADIENT, gradients, "overflowed"), (LOSS, losses, "had a non-finite loss"))
        if number
    ]
    skipped = ["skipped: " + ", ".join(parts)] if parts else []
    return "; ".join([*skipped, *(f"{FALLBACK} {r.precision} from step {r.index:,} on" for r in history.fallbacks)])
