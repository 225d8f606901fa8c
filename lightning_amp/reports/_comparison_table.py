"""The tables of `MetricComparison`: each metric, and each module's output, in AMP and in fp32."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from typing_extensions import final, override

from lightning_amp._arguments import require_count
from lightning_amp._text import rounded
from lightning_amp.findings import LOADER_SUFFIX, ComparisonRow, ModuleRow
from lightning_amp.reports._table import MAX_ROWS, SampledTable, aligned

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

    Behaves like a list of `ComparisonRow`; `str(table)` is a short text table of the last comparison
    (`to_text` has all of its rows).

    Args:
        rows: The first rows.
        tolerance: Half the width of the tolerance band in the plot: one number, one number per metric, or `None`.
    """

    _header = ComparisonRow._fields

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
        for row in self:
            groups.setdefault(_without_loader(row.metric), {}).setdefault(row.metric, []).append(row)
        number, title = len(groups), ""
        if max_rows is not None and number > max_rows:
            worst = [_without_loader(row.metric) for row in self._worst_first()]
            # Metrics that the last comparison does not have come last.
            groups = {name: groups[name] for name in list(dict.fromkeys([*worst, *groups]))[:max_rows]}
            title = f"the worst {max_rows} of {number} metrics; `plot(max_rows=None)` shows all"
        return saved(plot_comparison(groups, self.tolerance_of, title), path, dpi="figure")

    @override
    def to_text(self, max_rows: int | None = MAX_ROWS) -> str:
        """Write the last comparison as a text table.

        Args:
            max_rows: The most metrics to show: first the metrics that exceed their tolerance, then the largest relative
                differences. `None`: all, in the order in which they were logged.
        """
        require_count("max_rows", max_rows, none="or `None` for all rows")
        rows = shown = self.last
        if not rows:
            return "no comparison yet"
        if max_rows is not None and len(rows) > max_rows:
            shown = self._worst_first()[:max_rows]
        largest = dict.fromkeys((row.metric for row in shown), 0.0)
        for row in self:
            if row.metric in largest:
                largest[row.metric] = max(largest[row.metric], abs(row.diff))  # NaN is not the maximum
        lines = [("metric", "AMP", "fp32", "AMP - fp32", "relative", "largest so far")]
        lines += [
            (
                row.metric,
                f"{row.amp:.6g}",
                f"{row.fp32:.6g}",
                f"{row.diff:+.2e}",
                f"{row.relative_diff:+.2e}",
                f"{largest[row.metric]:.2e}",
            )
            for row in shown
        ]
        return aligned(lines, len(shown), len(rows), "comparison.table")

    def standing_out(
        self, num_rows: Callable[[str], int | None], error_of: Callable[[str], float]
    ) -> ComparisonRow | None:
        """Return the most suspicious metric of the last comparison: one that is not finite, or is far from fp32.

        Args:
            num_rows: Returns the number of samples behind a metric; `None` if the metric cannot be a share of them.
            error_of: Returns the standard error of a metric from batch to batch. Called only if the metric is not a
                share.
        """
        largest: dict[str, float] = {}
        for row in self:
            if math.isfinite(row.fp32):
                largest[row.metric] = max(largest.get(row.metric, 0.0), abs(row.fp32))

        def is_noise(row: ComparisonRow) -> bool:
            if not math.isfinite(row.amp):
                return False
            number = num_rows(row.metric)
            return row.is_noise(number) if number is not None else abs(row.diff) <= error_of(row.metric)

        found = [row for row in self.last if row.stands_out(largest.get(row.metric, 0.0)) and not is_noise(row)]
        return max(found, key=lambda row: (not math.isfinite(row.amp), abs(row.relative_diff)), default=None)

    def exceeding(self) -> str:
        """Name the metrics of the last comparison that exceed their tolerance, the worst first; "" if none does."""
        found = [
            f"`{row.metric}`: AMP {row.amp:.6g}, fp32 {row.fp32:.6g}, difference {row.diff:+.3g}, tolerance"
            f" {tolerance:g}"
            for row in self._worst_first()
            if (tolerance := self.tolerance_of(row.metric)) is not None and row.exceeds(tolerance)
        ]
        if len(found) > MAX_ROWS:
            found[MAX_ROWS:] = [f"and {len(found) - MAX_ROWS} more metrics"]
        return "; ".join(found)

    def _worst_first(self) -> list[ComparisonRow]:
        """Sort the last comparison: above the tolerance, then NaN on one side, then by relative difference."""

        def badness(row: ComparisonRow) -> tuple[bool, float]:
            tolerance = self.tolerance_of(row.metric)
            size = abs(row.relative_diff)
            if math.isnan(size):
                size = math.inf if row.exceeds(math.inf) else 0.0
            return tolerance is not None and row.exceeds(tolerance), size

        return sorted(self.last, key=badness, reverse=True)


def _without_loader(metric: str) -> str:
    return metric.partition(LOADER_SUFFIX)[0]


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

    @override
    def _key(self, row: ModuleRow) -> tuple[object, str]:
        return row[:2], row.name

    @override
    def to_text(self, max_rows: int | None = MAX_ROWS) -> str:
        """Write the latest comparison as a text table.

        Args:
            max_rows: The most modules to show: the lowest SQNR. `None`: all, in the order in which they ran.
        """
        require_count("max_rows", max_rows, none="or `None` for all rows")
        rows = shown = self.last
        if not rows:
            return "no comparison yet"
        if max_rows is not None:
            shown = sorted(rows, key=_worst_db)[:max_rows]
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


def _worst_db(row: ModuleRow) -> float:
    return -math.inf if math.isnan(row.sqnr_db) else min(row.sqnr_db, row.varying_sqnr_db)


def _decibels(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.1f} dB"
