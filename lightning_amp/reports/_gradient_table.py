"""The table of `GradientMonitor`: its rows, as text and as a heat map."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import final, override

from lightning_amp._arguments import require_choice, require_count
from lightning_amp.findings import TOTAL, GradientRow, bits_kept
from lightning_amp.reports._gradient_plot import QUANTITIES, Quantity, draw_heat_map
from lightning_amp.reports._table import MAX_ROWS, SampledTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
class GradientTable(SampledTable[GradientRow]):
    """All rows, oldest first. Prints the latest sample, the worst row first, and all gradients together last.

    .. code-block:: python

        monitor = GradientMonitor()
        L.Trainer(plugins=[AmpPrecision("fp16")], callbacks=[monitor], max_epochs=1).fit(model, data)
        print([row.name for row in monitor.table.last if row.underflow_fraction > 0.01])

    If there are more than 200 samples, every second one of the older half is dropped.
    """

    _header = tuple("length" if name == "norm_ratio" else name for name in GradientRow._fields)
    _called = "monitor.table"

    @override
    def _key(self, row: GradientRow) -> tuple[object, str]:
        return row.step, row.name

    @property
    def in_fp16(self) -> bool:
        """Return whether the latest sample ran in fp16, whose limits are shown."""
        return bool(self.last) and self.last[-1].precision == "fp16"

    def plot(
        self, quantity: Quantity | None, path: str | os.PathLike[str] | None, *, max_rows: int | None = MAX_ROWS
    ) -> Figure:
        """Return the figure of `GradientMonitor.plot`."""
        quantity = quantity or ("headroom_bits" if self.in_fp16 else "sqnr_db")
        require_choice("quantity", quantity, list(QUANTITIES))
        require_count("max_rows", max_rows, none="or `None` for all rows")
        samples = [[row for row in sample if row.name != TOTAL] for sample in self._samples]
        rows = sorted((row for sample in samples for row in sample), key=self._badness, reverse=True)
        worst = list(dict.fromkeys(row.name for row in rows))[:max_rows]  # by its worst step
        return draw_heat_map(samples, quantity, worst, path)

    @override
    def _badness(self, row: GradientRow) -> float:
        if row.name == TOTAL or row.largest == 0:
            return -math.inf
        measures = [row.sqnr_db / 6.02]
        if self.in_fp16:
            measures += [row.headroom_bits, 10 * (1 - row.underflow_fraction)]
        return math.inf if any(map(math.isnan, measures)) else -min(measures)

    @property
    @override
    def _titles(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("name", *(("to zero", "subnormal", "headroom") if self.in_fp16 else ()), "keeps", "SQNR", "cosine")

    @override
    def _written(self, row: GradientRow) -> Sequence[str]:
        """Write bits, SQNR and cosine. If they are not finite, write whether the fp32 gradient itself is."""
        keeps = "" if math.isnan(row.sqnr_db) or row.largest == 0 else bits_kept(row.sqnr_db, row.precision)
        if row.largest == 0:
            sqnr = "all zero"
        elif math.isnan(row.sqnr_db):
            sqnr = "overflow" if math.isfinite(row.largest) else "not finite in fp32"
        else:
            words = {math.inf: "equal", -math.inf: "zero in fp32"}
            sqnr = words.get(row.sqnr_db, f"{row.sqnr_db:.1f} dB")
        room = f"{row.headroom_bits:.1f} bits" if math.isfinite(row.headroom_bits) else sqnr
        limits = (f"{row.underflow_fraction:.1%}", f"{row.subnormal_fraction:.1%}", room) if self.in_fp16 else ()
        return row.name, *limits, keeps, sqnr, "" if math.isnan(row.cosine) else f"{row.cosine:.4f}"
