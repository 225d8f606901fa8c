"""Write the sentences of `MetricComparison`."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_amp._text import counted, named, rounded
from lightning_amp.findings import ComparisonRow, LostPrecision


def describe_comparison(rows: Sequence[ComparisonRow]) -> str:
    """Sum up a comparison by the metric that differs most, the first row."""
    worst = rows[0]
    text = f"MetricComparison, epoch {worst.epoch}: "
    if all(row.diff == 0 for row in rows):
        return f"{text}{counted(len(rows), 'metric')} compared, all equal to fp32."
    differs = f" ({100 * abs(worst.relative_diff):.2g} %)" if abs(worst.relative_diff) < 1 else ""
    text += f"`{worst.metric}` differs most: AMP {worst.amp:.6g}, fp32 {worst.fp32:.6g}{differs}."
    return text if len(rows) == 1 else f"{text} `print(comparison.table)` shows {counted(len(rows), 'metric')}."


def describe_difference(row: ComparisonRow, exceeding: str, found: LostPrecision | None, searched: bool) -> str:
    """Describe a metric that went wrong, or all metrics that exceed their tolerance, and the module to blame."""
    text = f"`{row.metric}` is {rounded(row.amp)} in AMP and {rounded(row.fp32)} in fp32 (epoch {row.epoch})"
    if exceeding:
        text = f"mixed precision costs more than the tolerance in epoch {row.epoch}: {exceeding}"
    because = "the first batches of the evaluation do not show why" if found is None else str(found)
    return f"`MetricComparison`: {text}" + (f"\n  {because}" if searched else "")


def describe_both(row: ComparisonRow, names: Sequence[str]) -> str:
    """Describe a metric that is not finite in fp32 either."""
    text = f"`MetricComparison`: `{row.metric}` is {rounded(row.amp)} in AMP, and {rounded(row.fp32)} in fp32 too"
    where = f"values that are not finite: {named(names)}" if names else "look at the data and the metric itself"
    return f"{text} (epoch {row.epoch})\n  {where}\n  fix: the data or the weights; no precision helps"


def describe_one_sided(names: Sequence[str]) -> str:
    """Name metrics that only one of the two runs logs."""
    return (
        f"`MetricComparison`: logged on one side only and not compared: {', '.join(names)}. A callback logs them, or"
        " the module does so depending on a value."
    )
