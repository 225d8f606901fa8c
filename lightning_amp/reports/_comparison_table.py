"""The numbers of `MetricComparison`: rows, tolerance, text, CSV. No Lightning in here."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from lightning_amp._arguments import is_count, require
from lightning_amp._files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOADER_SUFFIX = "/dataloader_idx_"

MAX_ROWS = 15
"""How many metrics a text or a picture shows unless asked for more."""


class ComparisonRow(NamedTuple):
    """One metric of one compared validation.

    `step` is the step that the loggers got. `diff` is AMP minus fp32, in the metric's own unit; `relative_diff` is
    `diff` over the magnitude of `fp32` (0 where both are 0, infinite where only `fp32` is).
    """

    epoch: int
    step: int
    metric: str
    amp: float
    fp32: float
    diff: float
    relative_diff: float

    @classmethod
    def of(cls, epoch: int, step: int, metric: str, amp: float, fp32: float) -> ComparisonRow:
        """Build a row from the two values."""
        # Equal infinities agree; their difference would be NaN.
        diff = 0.0 if amp == fp32 else amp - fp32
        if diff == 0.0:
            relative_diff = 0.0
        elif fp32 == 0.0:
            relative_diff = math.nan if math.isnan(diff) else math.copysign(math.inf, diff)
        else:
            relative_diff = diff / abs(fp32)
        return cls(epoch, step, metric, amp, fp32, diff, relative_diff)

    def exceeds(self, tolerance: float) -> bool:
        """Whether the two sides differ by more than `tolerance`. NaN on one side does, NaN on both does not."""
        if math.isnan(self.amp) or math.isnan(self.fp32):
            return math.isnan(self.amp) != math.isnan(self.fp32)
        return abs(self.diff) > tolerance


class ComparisonTable(Sequence[ComparisonRow]):
    """All rows of a run, in the order of the comparisons.

    .. code-block:: python

        comparison = MetricComparison()
        L.Trainer(plugins=[AmpPrecision("bf16")], callbacks=[comparison]).validate(model, data)
        print({row.metric: row.diff for row in comparison.table.last()})
        print(comparison.table.to_text(max_rows=None))

    Reads as a list of `ComparisonRow`; `str(table)` is a short text table of the last comparison
    (`to_text` has all of its rows).

    Args:
        rows: what it begins with.
        tolerance: for the band in the plot: one number, one per metric, or `None`.
    """

    def __init__(
        self, rows: Iterable[ComparisonRow] = (), tolerance: float | Mapping[str, float] | None = None
    ) -> None:
        self._rows = list(rows)
        self._start: int | None = None  # of the last comparison; `None`: not looked for yet
        self._tolerance = tolerance

    @overload
    def __getitem__(self, index: int) -> ComparisonRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[ComparisonRow]: ...
    def __getitem__(self, index: int | slice) -> ComparisonRow | list[ComparisonRow]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ComparisonRow]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    def extend(self, rows: Iterable[ComparisonRow]) -> None:
        """Add the rows of one comparison."""
        self._start = len(self._rows)
        self._rows.extend(rows)

    def tolerance_of(self, metric: str) -> float | None:
        """The tolerance that applies to a metric, if any."""
        return self._tolerance.get(metric) if isinstance(self._tolerance, Mapping) else self._tolerance

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table as CSV, with a header line. The file is replaced at once or not at all."""

        def write(file: Any) -> None:
            writer = csv.writer(file)
            writer.writerow(ComparisonRow._fields)
            writer.writerows(self)

        write_atomically(path, write)

    def plot(self, path: str | os.PathLike[str] | None = None, *, max_rows: int | None = MAX_ROWS) -> Figure:
        """Plot each metric over epochs: its values in AMP and in fp32, and beside them the difference.

        Several loaders are lines of one panel; a tolerance is a band. Needs matplotlib.

        Args:
            path: where to save the figure, in the format of the suffix. Default: do not save it.
            max_rows: how many metrics to show; of more, the worst, as in `to_text`. `None`: all.
        """
        from lightning_amp.reports._comparison_plot import plot_comparison
        from lightning_amp.reports._figures import saved

        _check_max_rows(max_rows)
        groups: dict[str, dict[str, list[ComparisonRow]]] = {}
        for row in self:
            groups.setdefault(_without_loader(row.metric), {}).setdefault(row.metric, []).append(row)
        number, title = len(groups), ""
        if max_rows is not None and number > max_rows:
            worst = [_without_loader(row.metric) for row in self._worst_first()]
            # Those that the last comparison does not have come last.
            groups = {name: groups[name] for name in list(dict.fromkeys([*worst, *groups]))[:max_rows]}
            title = f"the worst {max_rows} of {number} metrics; `plot(max_rows=None)` shows all"
        return saved(plot_comparison(groups, self.tolerance_of, title), path, dpi="figure")

    def to_text(self, max_rows: int | None = MAX_ROWS) -> str:
        """Write the last comparison as a text table.

        Args:
            max_rows: how many metrics to show. Of more, those are shown that exceed their tolerance or have the largest
                relative difference, the worst first. `None`: all, in the order in which they were logged.
        """
        _check_max_rows(max_rows)
        rows = shown = self.last()
        if not rows:
            return "no comparison yet"
        if max_rows is not None and len(rows) > max_rows:
            shown = self._worst_first()[:max_rows]
        largest = dict.fromkeys((row.metric for row in shown), 0.0)
        for row in self:
            if row.metric in largest:
                largest[row.metric] = max(largest[row.metric], abs(row.diff))  # a NaN does not win
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
        name_width, *widths = (max(len(line[i]) for line in lines) for i in range(len(lines[0])))
        text = [
            "  ".join([name.ljust(name_width), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
            for name, *cells in lines
        ]
        if len(shown) < len(rows):
            text.append(
                f"These are the {len(shown)} worst of {len(rows)}; `print(comparison.table.to_text(max_rows=None))`"
                " shows all."
            )
        return "\n".join(text)

    def exceeding(self) -> str:
        """Which metrics of the last comparison are beyond their tolerance, in words, the worst first; "" if none."""
        found = [
            f"`{row.metric}`: AMP {row.amp:.6g}, fp32 {row.fp32:.6g}, difference {row.diff:+.3g}, tolerance"
            f" {tolerance:g}"
            for row in self._worst_first()
            if (tolerance := self.tolerance_of(row.metric)) is not None and row.exceeds(tolerance)
        ]
        if len(found) > MAX_ROWS:
            found[MAX_ROWS:] = [f"and {len(found) - MAX_ROWS} more metrics"]
        return "; ".join(found)

    def __str__(self) -> str:
        return self.to_text()

    def last(self) -> list[ComparisonRow]:
        """The rows of the last comparison, in the order in which the metrics were logged."""
        if self._start is None:
            self._start = _start_of_last(self._rows)
        return self._rows[self._start :]

    def _worst_first(self) -> list[ComparisonRow]:
        """The rows of the last comparison: beyond the tolerance, then NaN on one side, then by relative difference."""

        def badness(row: ComparisonRow) -> tuple[bool, float]:
            tolerance = self.tolerance_of(row.metric)
            size = abs(row.relative_diff)
            one_sided = math.isnan(size) and row.exceeds(math.inf)
            return tolerance is not None and row.exceeds(tolerance), math.inf if one_sided else _or_zero(size)

        return sorted(self.last(), key=badness, reverse=True)


def _check_max_rows(value: int | None) -> None:
    require(value is None or is_count(value), "max_rows", "an integer of at least 1", value, "`None` shows all.")


def _without_loader(metric: str) -> str:
    return metric.partition(LOADER_SUFFIX)[0]


def _or_zero(size: float) -> float:
    return 0.0 if math.isnan(size) else size


def _start_of_last(rows: Sequence[ComparisonRow]) -> int:
    """Where the last comparison begins, in rows that come from a checkpoint."""
    start = len(rows)
    seen: set[str] = set()
    while start and rows[start - 1][:2] == rows[-1][:2] and rows[start - 1].metric not in seen:
        start -= 1
        seen.add(rows[start].metric)
    return start
