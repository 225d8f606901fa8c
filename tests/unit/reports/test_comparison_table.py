"""The rows of `MetricComparison`, their text and their CSV."""

from __future__ import annotations

import math

import pytest
from support.tables import comparisons, many_comparisons

from lightning_amp.reports import ComparisonRow, ComparisonTable

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("amp", "fp32", "diff", "relative"),
    [
        (3.0, 2.0, 1.0, 0.5),
        (1.0, -2.0, 3.0, 1.5),
        (0.0, 0.0, 0.0, 0.0),
        (-1.0, 0.0, -1.0, -INF),
        (NAN, 0.0, NAN, NAN),
        (INF, INF, 0.0, 0.0),
    ],
)
def test_row(amp: float, fp32: float, diff: float, relative: float) -> None:
    row = ComparisonRow.of(0, 0, "m", amp, fp32)
    assert (row.diff, row.relative_diff) == pytest.approx((diff, relative), nan_ok=True)
    with pytest.raises(AttributeError):
        row.amp = 1.0  # type: ignore[misc]


def test_text() -> None:
    lines = str(comparisons()).splitlines()
    assert [line.split()[0] for line in lines] == ["metric", "loss", "acc/dataloader_idx_0", "acc/dataloader_idx_1"]
    assert lines[1].split()[1:] == ["1.2", "1", "+2.00e-01", "+2.00e-01"]
    assert str(ComparisonTable()) == "no sample yet"
    assert repr(comparisons()) == "ComparisonTable(9 rows)"


def test_at_most_fifteen_rows_the_worst() -> None:
    lines = str(many_comparisons()).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [f"m{i}" for i in range(19, 4, -1)]
    assert lines[-1] == "These are the 15 worst of 20; `print(comparison.table.to_text(max_rows=None))` shows all."
    assert len(many_comparisons().to_text(None).splitlines()) == 21
    assert [line.split()[0] for line in many_comparisons().to_text(2).splitlines()] == ["metric", "m19", "m18", "These"]
    assert len(str(many_comparisons(15)).splitlines()) == 16
    for wrong in (0, True, "3", 1.5):
        with pytest.raises(ValueError, match="`max_rows` must be an integer of 1 or more, or `None` for all rows; got"):
            many_comparisons().to_text(wrong)  # pyright: ignore[reportArgumentType]


def test_the_worst_are_beyond_their_tolerance_or_nan() -> None:
    table = many_comparisons(tolerance={"m3": 0.0})
    table.add([*table.last, ComparisonRow.of(1, 1, "nan", NAN, 1.0), ComparisonRow.of(1, 1, "both", NAN, NAN)])
    names = [line.split()[0] for line in table.to_text(3).splitlines()]
    assert names == ["metric", "m3", "nan", "m19", "These"]
    assert "both" not in table.to_text(21)
    assert table.exceeding().startswith("`m3`: AMP")


def test_a_warning_does_not_name_a_hundred_metrics() -> None:
    assert many_comparisons(100, tolerance=0.0).exceeding().endswith("; and 84 more metrics")  # m0 does not differ
