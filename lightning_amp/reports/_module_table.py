"""What `MetricComparison(by_module=True)` measured: each module's output against fp32."""

from __future__ import annotations

import math
from typing import NamedTuple

from typing_extensions import final, override

from lightning_amp._arguments import require_count
from lightning_amp._text import rounded
from lightning_amp.reports._table import MAX_ROWS, SampledTable, aligned


@final
class ModuleRow(NamedTuple):
    """The outputs of one module in one compared validation, all its calls together.

    Attributes:
        epoch: `trainer.current_epoch`.
        step: `trainer.global_step`.
        name: Qualified name.
        kind: Its class.
        num_calls: How often it ran.
        sqnr_db: Signal to noise of its outputs against fp32; 6 dB are one correct bit. NaN if one is not finite.
        varying_sqnr_db: The same of what differs between the samples of a batch, that is after subtraction of their
            mean: in `x + 1000` little of the whole is wrong in bfloat16, and most of what matters.
        cosine: Between the two; NaN if one is not finite.
        rms: Root mean square of the outputs in fp32.
    """

    epoch: int
    step: int
    name: str
    kind: str
    num_calls: int
    sqnr_db: float
    varying_sqnr_db: float
    cosine: float
    rms: float

    @property
    def worst_db(self) -> float:
        """Return the lower of the two ratios; minus infinity if an output is not finite."""
        return -math.inf if math.isnan(self.sqnr_db) else min(self.sqnr_db, self.varying_sqnr_db)


@final
class ModuleTable(SampledTable[ModuleRow]):
    """All rows of a run, in each comparison in the order in which the modules ran. Prints the latest, the worst first.

    .. code-block:: python

        comparison = MetricComparison(by_module=True)
        L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison]).validate(model, data)
        print([row.name for row in comparison.module_table.last if row.sqnr_db < 20])
    """

    _header = ModuleRow._fields

    @override
    def _key(self, row: ModuleRow) -> tuple[object, str]:
        return row[:2], row.name

    @override
    def to_text(self, max_rows: int | None = MAX_ROWS) -> str:
        """Write the latest comparison as a text table.

        Args:
            max_rows: Of more modules only those with the lowest SQNR are shown. `None`: all, in the order in which they
                ran.
        """
        require_count("max_rows", max_rows, none="or `None` for all rows")
        rows = shown = self.last
        if not rows:
            return "no comparison yet"
        if max_rows is not None:
            shown = sorted(rows, key=lambda row: row.worst_db)[:max_rows]
        lines = [("module", "calls", "SQNR", "between samples", "cosine", "RMS")]
        lines += [
            (
                row.name or "(forward)",
                f"{row.num_calls}",
                _decibels(row.sqnr_db),
                _decibels(row.varying_sqnr_db),
                f"{row.cosine:.4f}",
                rounded(row.rms),
            )
            for row in shown
        ]
        return aligned(lines, len(shown), len(rows), "comparison.module_table")


def _decibels(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.1f} dB"
