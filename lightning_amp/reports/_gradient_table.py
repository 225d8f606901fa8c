"""What `GradientMonitor` measured: rows for people, a heat map, and the scale that follows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, NamedTuple, overload

from lightning_amp._arguments import require_choice, require_count
from lightning_amp.reports._gradient_plot import QUANTITIES, Quantity, draw_heat_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOTAL = "(all)"
MAX_SAMPLES = 200
MAX_ROWS = 15


class GradientRow(NamedTuple):
    """One module, or parameter, at one step.

    Attributes:
        step: `trainer.global_step` before the sampled step.
        name: Qualified name; `"(all)"` for all gradients together.
        scale: The loss scale that the shares and the headroom are meant for.
        num_values: How many gradients are not zero.
        underflow_fraction: Share of these that becomes zero in fp16.
        subnormal_fraction: Share of these that loses bits.
        headroom_bits: How often the scale could be doubled before the largest leaves fp16.
        sqnr_db: Of the mixed-precision gradient against fp32; NaN if it overflowed.
        cosine: Between the two; NaN if it overflowed.
        largest: Largest magnitude, unscaled.

    """

    step: int
    name: str
    scale: float
    num_values: int
    underflow_fraction: float
    subnormal_fraction: float
    headroom_bits: float
    sqnr_db: float
    cosine: float
    largest: float


class GradientTable(Sequence[GradientRow]):
    """All rows, oldest first. Prints the latest sample, the least headroom first.

    .. code-block:: python

        monitor = GradientMonitor()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
        print([row.name for row in monitor.table.last if row.underflow_fraction > 0.01])

    Of more than 200 samples every second one of the older half is forgotten.
    """

    def __init__(self, rows: Iterable[GradientRow] = ()) -> None:
        self._samples: list[list[GradientRow]] = []
        for row in rows:
            if not self._samples or self._samples[-1][0].step != row.step:
                self._samples.append([])
            self._samples[-1].append(row)

    def add(self, sample: list[GradientRow]) -> None:
        """Append the rows of one step."""
        self._samples.append(sample)
        if len(self._samples) > MAX_SAMPLES:
            half = MAX_SAMPLES // 2
            self._samples = self._samples[:half:2] + self._samples[half:]

    @property
    def last(self) -> list[GradientRow]:
        """The rows of the latest step."""
        return list(self._samples[-1]) if self._samples else []

    def __iter__(self) -> Iterator[GradientRow]:
        return (row for sample in self._samples for row in sample)

    def __len__(self) -> int:
        return sum(len(sample) for sample in self._samples)

    @overload
    def __getitem__(self, index: int) -> GradientRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[GradientRow]: ...
    def __getitem__(self, index: int | slice) -> GradientRow | list[GradientRow]:
        return list(self)[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, max_rows: int | None = MAX_ROWS) -> str:
        """The latest sample as a table, the least headroom first.

        Args:
            max_rows: Of more rows only the worst are shown: those with the least headroom, the lowest SQNR, or the
                largest share that becomes zero, as many of each. `None` shows all.

        """
        require_count("max_rows", max_rows, none="or `None` for all rows")
        if not self._samples:
            return "no sample yet"
        rows = [row for row in self.last if row.name != TOTAL]
        shown = _worst(rows, max_rows)
        total = [row for row in self.last if row.name == TOTAL]
        header = ("name", "to zero", "subnormal", "headroom", "SQNR", "cosine")
        cells = [header, *(_cells(row) for row in (*sorted(shown, key=_room), *total))]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in cells
        ]
        if len(shown) < len(rows):
            lines.append(
                f"These are the {len(shown)} worst of {len(rows)}; `print(monitor.table.to_text(max_rows=None))` shows"
                " all."
            )
        return "\n".join(line.rstrip() for line in lines)

    def plot(
        self, quantity: Quantity, path: str | os.PathLike[str] | None, *, max_rows: int | None = MAX_ROWS
    ) -> Figure:
        """See `GradientMonitor.plot`."""
        require_choice("quantity", quantity, list(QUANTITIES))
        require_count("max_rows", max_rows, none="or `None` for all rows")
        samples = [[row for row in sample if row.name != TOTAL] for sample in self._samples]
        return draw_heat_map(samples, quantity, path, max_rows)


def _room(row: GradientRow) -> float:
    return -math.inf if math.isnan(row.headroom_bits) else row.headroom_bits


def _worst(rows: list[GradientRow], max_rows: int | None) -> list[GradientRow]:
    """In turn the worst by each of the measures: a row that loses everything to zero has the most headroom of all."""
    orders = (
        sorted(rows, key=_room),
        sorted(rows, key=lambda row: -math.inf if math.isnan(row.sqnr_db) else row.sqnr_db),
        sorted((row for row in rows if row.underflow_fraction > 0), key=lambda row: -row.underflow_fraction),
    )
    ranked = dict.fromkeys(row for row in chain.from_iterable(zip_longest(*orders)) if row is not None)
    return list(ranked)[:max_rows]


def _cells(row: GradientRow) -> tuple[str, ...]:
    if row.largest == 0:
        return (row.name, "all zero", "", "", "", "")
    return (
        row.name,
        f"{row.underflow_fraction:.1%}",
        f"{row.subnormal_fraction:.1%}",
        f"{row.headroom_bits:.1f} bits" if math.isfinite(row.headroom_bits) else "overflow",
        f"{row.sqnr_db:.1f} dB" if math.isfinite(row.sqnr_db) else "equal" if row.sqnr_db > 0 else "overflow",
        "" if math.isnan(row.cosine) else f"{row.cosine:.4f}",
    )
