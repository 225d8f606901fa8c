"""The table of `GradientMonitor`: its rows, as text and as a heat map."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from typing_extensions import final, override

from lightning_amp._arguments import require_choice, require_count
from lightning_amp.findings import TOTAL, GradientRow
from lightning_amp.reports._gradient_plot import QUANTITIES, Quantity, draw_heat_map
from lightning_amp.reports._table import MAX_ROWS, SampledTable, aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_SAMPLES = 200


@final
class GradientTable(SampledTable[GradientRow]):
    """All rows, oldest first. Prints the latest sample, the least headroom first.

    .. code-block:: python

        monitor = GradientMonitor()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
        print([row.name for row in monitor.table.last if row.underflow_fraction > 0.01])

    If there are more than 200 samples, every second one of the older half is dropped.
    """

    _header = tuple("length" if name == "norm_ratio" else name for name in GradientRow._fields)

    @override
    def _key(self, row: GradientRow) -> tuple[object, str]:
        return row.step, row.name

    @override
    def add(self, rows: Iterable[GradientRow]) -> None:
        super().add(rows)
        if len(self._samples) > _MAX_SAMPLES:
            half = _MAX_SAMPLES // 2
            self._samples = self._samples[:half:2] + self._samples[half:]

    @override
    def to_text(self, max_rows: int | None = MAX_ROWS, *, fp16: bool | None = None) -> str:
        """Write the latest sample as a text table: the least headroom first, or the lowest SQNR without fp16's limits.

        Args:
            max_rows: The most rows to show: in turn the row with the least headroom, the lowest SQNR, and the largest
                share that becomes zero. `None` shows all.
            fp16: Whether to show the limits of fp16. `None`: if the step ran in fp16.
        """
        require_count("max_rows", max_rows, none="or `None` for all rows")
        if not self._samples:
            return "no sample yet"
        rows = [row for row in self.last if row.name != TOTAL]
        total = [row for row in self.last if row.name == TOTAL]
        fp16 = any(row.precision in ("fp16", "") for row in self.last) if fp16 is None else fp16
        shown = _worst(rows, max_rows, fp16)
        ordered = (*sorted(shown, key=_room if fp16 else _fidelity), *total)
        if fp16:
            header, cells = ("name", "to zero", "subnormal", "headroom", "SQNR", "cosine"), _fp16_cells
        else:
            header, cells = ("name", "SQNR", "cosine"), _cells
        lines = [header, *map(cells, ordered)]
        return aligned(lines, len(shown), len(rows), "monitor.table")

    def plot(
        self, quantity: Quantity, path: str | os.PathLike[str] | None, *, max_rows: int | None = MAX_ROWS
    ) -> Figure:
        """Return the figure of `GradientMonitor.plot`."""
        require_choice("quantity", quantity, list(QUANTITIES))
        require_count("max_rows", max_rows, none="or `None` for all rows")
        samples = [[row for row in sample if row.name != TOTAL] for sample in self._samples]
        return draw_heat_map(samples, quantity, path, max_rows)


def _room(row: GradientRow) -> float:
    return -math.inf if math.isnan(row.headroom_bits) else row.headroom_bits


def _fidelity(row: GradientRow) -> float:
    return -math.inf if math.isnan(row.sqnr_db) else row.sqnr_db


def _worst(rows: list[GradientRow], max_rows: int | None, fp16: bool) -> list[GradientRow]:
    """Take the worst row by each measure in turn: the measures disagree, as a row of zeros has the most headroom."""
    by_fidelity = sorted(rows, key=_fidelity)
    orders = [by_fidelity]
    if fp16:
        lost = [row for row in rows if row.underflow_fraction > 0]
        orders = [sorted(rows, key=_room), by_fidelity, sorted(lost, key=lambda row: -row.underflow_fraction)]
    ranked = dict.fromkeys(row for row in chain.from_iterable(zip_longest(*orders)) if row is not None)
    return list(ranked)[:max_rows]


def _fp16_cells(row: GradientRow) -> tuple[str, ...]:
    if row.largest == 0:
        return (row.name, "all zero", "", "", "", "")
    room = "NaN" if math.isnan(row.largest) else "overflow"
    return (
        row.name,
        f"{row.underflow_fraction:.1%}",
        f"{row.subnormal_fraction:.1%}",
        f"{row.headroom_bits:.1f} bits" if math.isfinite(row.headroom_bits) else room,
        *_distance(row),
    )


def _cells(row: GradientRow) -> tuple[str, ...]:
    return (row.name, "all zero", "") if row.largest == 0 else (row.name, *_distance(row))


def _distance(row: GradientRow) -> tuple[str, str]:
    """Write SQNR and cosine. If they are not finite, write whether the fp32 gradient itself is NaN or infinite."""
    if math.isfinite(row.sqnr_db):
        sqnr = f"{row.sqnr_db:.1f} dB"
    elif row.sqnr_db > 0:
        sqnr = "equal"
    elif row.sqnr_db < 0:
        sqnr = "zero in fp32"
    elif math.isfinite(row.largest):
        sqnr = "overflow" if row.precision in ("fp16", "") else "not finite"
    else:
        sqnr = "NaN" if math.isnan(row.largest) else "overflow"
    return sqnr, "" if math.isnan(row.cosine) else f"{row.cosine:.4f}"
