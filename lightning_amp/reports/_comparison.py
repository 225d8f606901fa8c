"""Show the findings of `MetricComparison`: tables of each metric and of each module's output, plot and sentences."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import final, override

from lightning_amp._text import counted, listed, named, rounded
from lightning_amp.findings import ComparisonRow, LostPrecision, ModuleRow, describe_tried
from lightning_amp.reports._figures import COLORS, new_figure, saved, say_empty
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
    are the metrics that are NaN or infinite in mixed precision only. Then come the metrics that exceed their tolerance,
    and the largest relative differences. If there are more than 200 comparisons, every second one of the older half is
    dropped.

    Args:
        rows: The first rows.
        tolerance: Half the width of the tolerance band in the plot: one number, one number per metric, or `None`.
    """

    _header = ComparisonRow._fields
    _called = "comparison.table"
    _titles = ("metric", "AMP", "fp32", "AMP - fp32", "relative")
    _name_at = 2

    def __init__(
        self, rows: Iterable[ComparisonRow] = (), tolerance: float | Mapping[str, float] | None = None
    ) -> None:
        super().__init__(rows)
        self._tolerance = tolerance

    def _tolerance_of(self, metric: str) -> float | None:
        return self._tolerance.get(metric) if isinstance(self._tolerance, Mapping) else self._tolerance

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot each metric over steps: its values in AMP and in fp32, and next to them the difference.

        It shows the 15 worst metrics at most. A tolerance is a green band. Needs matplotlib.

        Args:
            path: Path or URL of a file for the figure, in the format of its suffix. Default: do not save it.
        """
        metrics: dict[str, list[ComparisonRow]] = {row.metric: [] for row in [*self.worst_first(), *self]}
        for row in self:
            metrics[row.metric].append(row)
        shown = dict([*metrics.items()][:MAX_ROWS])
        figure = new_figure(10.0, 0.6 + 2.0 * max(len(shown), 1))
        if len(shown) < len(metrics):
            figure.suptitle(f"the {len(shown)} worst of {len(metrics)} metrics", fontsize="medium")
        axes: Any = figure.subplots(max(len(shown), 1), 2, sharex=True, squeeze=False)
        axes[0, 0].set_title("value")
        axes[0, 1].set_title("AMP - fp32")
        for axis in [] if shown else axes.flat:
            say_empty(axis, "no comparison yet")
        for (values, differences), (metric, rows) in zip(axes, shown.items(), strict=False):
            values.set_ylabel(metric.replace("/", "/\n"))
            _draw(values, rows, ("fp32", "amp"))
            _draw(differences, rows, ("diff",))
            largest = max((abs(row.diff) for row in rows if math.isfinite(row.diff)), default=0.0)
            tolerance = self._tolerance_of(metric)
            if tolerance is not None and math.isfinite(tolerance):
                label = f"tolerance {tolerance:g}"
                differences.axhspan(-tolerance, tolerance, color="tab:green", alpha=0.12, zorder=0, label=label)
                largest = max(largest, min(tolerance, 10 * largest or tolerance))
            height = 1.2 * largest or 1.0  # zero is in the middle, and a large tolerance does not flatten the line
            differences.set_ylim(-height, height)
            for axis in (values, differences):
                axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)
                axis.legend(fontsize="small")
        for axis in axes[-1] if shown else ():
            axis.set_xlabel("step")
            axis.xaxis.get_major_locator().set_params(integer=True)
        return saved(figure, path)

    def suspect(self) -> ComparisonRow | None:
        """Return the worst metric of the last comparison, if it exceeds its tolerance or went clearly wrong."""
        rows = [row for row in self.worst_first() if self._exceeds(row) or row.went_wrong]
        return min(rows, key=lambda r: (not r.is_broken, not self._exceeds(r), math.isfinite(r.amp)), default=None)

    def exceeding(self) -> str:
        """Name the metrics of the last comparison that exceed their tolerance, the worst first; "" if none does."""
        found = [
            f"`{row.metric}`: AMP {row.amp:.6g}, fp32 {row.fp32:.6g}, difference {row.diff:+.3g}, tolerance"
            f" {self._tolerance_of(row.metric):g}"
            for row in self.worst_first()
            if self._exceeds(row)
        ]
        if len(found) > MAX_ROWS:
            found[MAX_ROWS:] = [f"and {len(found) - MAX_ROWS} more metrics"]
        return "; ".join(found)

    def _exceeds(self, row: ComparisonRow) -> bool:
        tolerance = self._tolerance_of(row.metric)
        return tolerance is not None and row.exceeds(tolerance)

    @override
    def _badness(self, row: ComparisonRow) -> tuple[bool, bool, float]:
        size = abs(row.relative_diff)
        if math.isnan(size):
            size = math.inf if row.exceeds(math.inf) else 0.0
        return row.is_broken, self._exceeds(row), size

    @override
    def _written(self, row: ComparisonRow) -> Sequence[str]:
        return row.metric, f"{row.amp:.6g}", f"{row.fp32:.6g}", f"{row.diff:+.2e}", f"{row.relative_diff:+.2e}"


def _draw(axis: Any, rows: Sequence[ComparisonRow], fields: Sequence[str]) -> None:
    """Draw values over steps, and mark those that are not finite: a gap alone is easy to overlook."""
    steps, bad = [row.step for row in rows], list[int]()
    for field, color, width in zip(fields, COLORS, (4, 1), strict=False):  # the two lines nearly coincide
        values = [getattr(row, field) for row in rows]
        bad += [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        finite = [value if math.isfinite(value) else math.nan for value in values]
        axis.plot(steps, finite, color=color, linewidth=width, marker="o", markersize=width + 2, label=field)
    if bad:
        place = {"color": "tab:red", "transform": axis.get_xaxis_transform()}
        axis.plot(bad, [0.06] * len(bad), "x", label="NaN or inf", **place)


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
    _name_at = 2

    @override
    def _badness(self, row: ModuleRow) -> float:
        return math.inf if math.isnan(row.sqnr_db) else -min(row.sqnr_db, row.varying_sqnr_db)

    @override
    def _written(self, row: ModuleRow) -> Sequence[str]:
        levels = ["not finite" if math.isnan(db) else f"{db:.1f} dB" for db in (row.sqnr_db, row.varying_sqnr_db)]
        return row.name or "(forward)", f"{row.num_calls}", *levels, f"{row.cosine:.4f}", rounded(row.rms)


# -- sentences ---------------------------------------------------------------------------------------------------------

_NOT_TRIED = "fix: `eval_precision='fp32'` (not tried)"


def describe_comparison(rows: Sequence[ComparisonRow], found: LostPrecision | None) -> str:
    """Sum up a comparison by the metric that differs most; `found` says what was tried against it."""
    worst, *_ = rows = ComparisonTable(rows).worst_first()  # whatever its tolerance
    text = f"MetricComparison, epoch {worst.epoch}: "
    if all(row.diff == 0 or (math.isnan(row.amp) and math.isnan(row.fp32)) for row in rows):
        broken = [f"`{row.metric}` is {row.fp32:.6g} in both" for row in rows if not math.isfinite(row.fp32)]
        return f"{text}{counted(len(rows), 'metric')} compared, all equal to fp32{'; '.join(['', *broken])}."
    if worst.is_broken:
        broken = [f"`{row.metric}` (AMP {row.amp:.6g}, fp32 {row.fp32:.6g})" for row in rows if row.is_broken]
        tried = found.tried if found is not None and found.metric == worst.metric else ()
        fix = describe_tried(tried) if tried else _NOT_TRIED
        return f"{text}NaN or infinite in mixed precision only: {listed(broken)}\n  {fix}"
    share = 100 * abs(worst.relative_diff)
    differs = f" ({share:.2g} %)" if share < 100 else f" ({share:,.0f} %)" if math.isfinite(share) else ""
    text += f"`{worst.metric}` differs most: AMP {worst.amp:.6g}, fp32 {worst.fp32:.6g}{differs}."
    return text if len(rows) == 1 else f"{text} `print(comparison.table)` shows {counted(len(rows), 'metric')}."


def describe_difference(row: ComparisonRow, exceeding: str, found: LostPrecision | None, searched: bool) -> str:
    """Describe a metric that went wrong, or all metrics that exceed their tolerance, and the module to blame."""
    text = f"`{row.metric}` is {rounded(row.amp)} in AMP and {rounded(row.fp32)} in fp32 (epoch {row.epoch})"
    if exceeding:
        costs = f"mixed precision differs by more than the tolerance in epoch {row.epoch}: {exceeding}"
        text = f"{text}; {costs}" if row.is_broken and f"`{row.metric}`" not in exceeding else costs
    because = found or f"no module explains it in the first batches of the evaluation\n  {_NOT_TRIED}"
    return f"`MetricComparison`: {text}" + (f"\n  {because}" if searched else "")


def describe_both(row: ComparisonRow, names: Sequence[str], num_checked: int, num_batches: int) -> str:
    """Describe a metric that is not finite in fp32 either; `num_checked` of its batches were searched for `names`."""
    text = f"`MetricComparison`: `{row.metric}` is {rounded(row.amp)} in AMP, and {rounded(row.fp32)} in fp32 too"
    where = f"values that are not finite: {named(names)}"
    if not names:
        where = f"parameters, buffers and {num_checked} of {num_batches:,} batches were checked, and are finite"
    fix = "these values; or, if the step leaves them out, " * bool(names)
    fix += "a quotient or `log` of 0, in the metric or the model, a correlation with a constant, or huge weights"
    return f"{text} (epoch {row.epoch})\n  {where}\n  fix: {fix}; no precision helps"
