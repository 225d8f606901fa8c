"""The tables of `MetricComparison`: each metric, and each module's output, in AMP and in fp32."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import final, override

from lightning_amp._arguments import require_count
from lightning_amp._text import rounded
from lightning_amp.findings import LOADER_SUFFIX, ComparisonRow, ModuleRow
from lightning_amp.reports._table import MAX_ROWS, SampledTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
class ComparisonTable(SampledTable[ComparisonRow]):
    """All rows of a run, in the order of the comparisons.

    .. code-block:: python

        comparison = MetricComparison()
        L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison]).validate(model, data)
        print({row.metric: row.diff for row in comparison.table.last})
        print(comparison.table.to_text(max_rows=None))

    Behaves like a list of `ComparisonRow`; `str(table)` is a short text table of the last comparison. Its first rows
    are the metrics that exceed their tolerance, then the largest relative differences. If there are more than 200
    comparisons, every second one of the older half is dropped.

    Args:
        rows: The first rows.
        tolerance: Half the width of the tolerance band in the plot: one number, one number per metric, or `None`.
    """

    _header = ComparisonRow._fields
    _called = "comparison.table"
    _titles = ("metric", "AMP", "fp32", "AMP - fp32", "relative")

    def __init__(
        self, rows: Iterable[ComparisonRow] = (), tolerance: float | Mapping[str, float] | None = None
    ) -> None:
        super().__init__(rows)
        self._tolerance = tolerance

    @override
    def _key(self, row: ComparisonRow) -> tuple[object, str]:
        return row[:2], row.metric

    def tolerance_of(self, metric: str) -> float | None:
        """Return the tolerance that applies to a metric, if any."""
        return self._tolerance.get(metric) if isinstance(self._tolerance, Mapping) else self._tolerance

    def plot(self, path: str | os.PathLike[str] | None = None, *, max_rows: int | None = MAX_ROWS) -> Figure:
        """Plot each metric over epochs: its values in AMP and in fp32, and next to them the difference.

        Several loaders are drawn as lines in one panel; a tolerance is a band. Needs matplotlib.

        Args:
            path: Path or URL of a file for the figure, in the format of its suffix. Default: do not save it.
            max_rows: The most metrics to show: the worst, as in `to_text`. `None`: all.
        """
        from lightning_amp.reports._comparison_plot import plot_comparison
        from lightning_amp.reports._figures import saved

        require_count("max_rows", max_rows, none="or `None` for all rows")
        groups: dict[str, dict[str, list[ComparisonRow]]] = {}
        for row in [*([] if max_rows is None else self.worst_first()), *self]:
            groups.setdefault(row.metric.partition(LOADER_SUFFIX)[0], {}).setdefault(row.metric, [])
        for row in self:
            groups[row.metric.partition(LOADER_SUFFIX)[0]][row.metric].append(row)
        shown = dict(list(groups.items())[:max_rows])
        left_out = len(groups) - len(shown)
        title = f"the {len(shown)} worst of {len(groups)} metrics; `plot(max_rows=None)` shows all" if left_out else ""
        return saved(plot_comparison(shown, self.tolerance_of, title), path, dpi="figure")

    def suspect(self) -> ComparisonRow | None:
        """Return the worst metric of the last comparison, if it exceeds its tolerance or went clearly wrong."""
        rows = [row for row in self.worst_first() if self._exceeds(row) or row.went_wrong]
        return min(rows, key=lambda row: (not self._exceeds(row), math.isfinite(row.amp)), default=None)

    def exceeding(self) -> str:
        """Name the metrics of the last comparison that exceed their tolerance, the worst first; "" if none does."""
        found = [
            f"`{row.metric}`: AMP {row.amp:.6g}, fp32 {row.fp32:.6g}, difference {row.diff:+.3g}, tolerance"
            f" {self.tolerance_of(row.metric):g}"
            for row in self.worst_first()
            if self._exceeds(row)
        ]
        if len(found) > MAX_ROWS:
            found[MAX_ROWS:] = [f"and {len(found) - MAX_ROWS} more metrics"]
        return "; ".join(found)

    def _exceeds(self, row: ComparisonRow) -> bool:
        tolerance = self.tolerance_of(row.metric)
        return tolerance is not None and row.exceeds(tolerance)

    @override
    def _badness(self, row: ComparisonRow) -> tuple[bool, float]:
        size = abs(row.relative_diff)
        if math.isnan(size):
            size = math.inf if row.exceeds(math.inf) else 0.0
        return self._exceeds(row), size

    @override
    def _written(self, row: ComparisonRow) -> Sequence[str]:
        return row.metric, f"{row.amp:.6g}", f"{row.fp32:.6g}", f"{row.diff:+.2e}", f"{row.relative_diff:+.2e}"


@final
class ModuleTable(SampledTable[ModuleRow]):
    """All rows of a run. The rows of a comparison have the order in which the modules ran.

    The worst rows are printed first.

    .. code-block:: python

        comparison = MetricComparison(by_module=True)
        L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison]).validate(model, data)
        print([row.name for row in comparison.module_table.last if row.sqnr_db < 20])
    """

    _header = ModuleRow._fields
    _called = "comparison.module_table"
    _titles = ("module", "calls", "SQNR", "between samples", "cosine", "RMS")

    @override
    def _key(self, row: ModuleRow) -> tuple[object, str]:
        return row[:2], row.name

    @override
    def _badness(self, row: ModuleRow) -> float:
        return math.inf if math.isnan(row.sqnr_db) else -min(row.sqnr_db, row.varying_sqnr_db)

    @override
    def _written(self, row: ModuleRow) -> Sequence[str]:
        levels = ["not finite" if math.isnan(db) else f"{db:.1f} dB" for db in (row.sqnr_db, row.varying_sqnr_db)]
        return row.name or "(forward)", f"{row.num_calls}", *levels, f"{row.cosine:.4f}", rounded(row.rms)
