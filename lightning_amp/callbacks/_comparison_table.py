"""The numbers of `MetricComparison`: rows, tolerance, text, CSV, plot. No Lightning in here."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from lightning_amp._files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOADER_SUFFIX = "/dataloader_idx_"


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

    Reads as a list of `ComparisonRow`; `str(table)` is a short text table of the last comparison.

    Args:
        rows: what it begins with.
        tolerance: for the band in the plot: one number, one per metric, or `None`.
    """

    def __init__(
        self, rows: Iterable[ComparisonRow] = (), tolerance: float | Mapping[str, float] | None = None
    ) -> None:
        self._rows = list(rows)
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

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot the differences over epochs: one axis per metric, one line per loader, and the tolerance as a band.

        Args:
            path: where to save the figure, in the format of the suffix. Default: do not save it.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("`plot` needs matplotlib: `pip install matplotlib`") from error

        groups: dict[str, dict[str, list[ComparisonRow]]] = {}
        for row in self:
            groups.setdefault(row.metric.partition(LOADER_SUFFIX)[0], {}).setdefault(row.metric, []).append(row)
        figure = Figure(figsize=(7.0, 2.6 * max(len(groups), 1)), layout="constrained")
        axes: Any = figure.subplots(max(len(groups), 1), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (group, lines) in zip(axes, groups.items(), strict=False):
            axis.axhline(0.0, color="0.6", linewidth=0.8)
            for metric, rows in lines.items():
                axis.plot([row.epoch for row in rows], [row.diff for row in rows], marker=".", label=metric)
            for tolerance in {t for metric in lines if (t := self.tolerance_of(metric)) is not None}:
                axis.axhspan(-tolerance, tolerance, color="tab:green", alpha=0.12, label=f"tolerance {tolerance:g}")
            axis.set_ylabel(f"{group}\nAMP - fp32")
            axis.legend(fontsize="small")
        axes[-1].set_xlabel("epoch")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        if not self._rows:
            return "no comparison yet"
        last: dict[str, ComparisonRow] = {}
        largest: dict[str, float] = {}
        for row in self:
            if last and next(iter(last.values()))[:2] != row[:2]:
                last = {}
            last[row.metric] = row
            largest[row.metric] = max(largest.get(row.metric, 0.0), abs(row.diff))  # a NaN does not win
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
            for row in last.values()
        ]
        name_width, *widths = (max(len(line[i]) for line in lines) for i in range(len(lines[0])))
        return "\n".join(
            "  ".join([name.ljust(name_width), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
            for name, *cells in lines
        )
