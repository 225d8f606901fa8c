"""The rows of `MetricComparison`, of metrics and of modules, their text and their CSV."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.approved import assert_approved
from support.tables import comparisons, many_comparisons

from lightning_amp.reports import ComparisonRow, ComparisonTable, ModuleRow, ModuleTable, describe_comparison

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


def test_the_printed_tables() -> None:
    """The worst come first: those that are not finite in AMP only, then those beyond their tolerance."""
    worst = many_comparisons(tolerance={"m3": 0.0})
    worst.add([*worst.last, ComparisonRow.of(1, 1, "nan", NAN, 1.0), ComparisonRow.of(1, 1, "both", NAN, NAN)])
    tables = {"loaders": comparisons(), "many": many_comparisons(), "empty": ComparisonTable()}
    texts = {case: str(table) for case, table in tables.items()}
    texts["the three worst"] = worst.to_text(3)
    for value in (1.0, INF, NAN):
        rows = [ComparisonRow.of(0, 0, *one) for one in (("a", 1.0, 1.0), ("b", value, value))]
        texts[f"{value} in both"] = describe_comparison(rows, None)
    assert_approved("metric_comparison", texts)
    assert worst.exceeding().startswith("`m3`: AMP")
    assert len(many_comparisons().to_text(None).splitlines()) == 21
    for wrong in (0, True, "3", 1.5):
        with pytest.raises(ValueError, match="`max_rows` must be an integer of 1 or more, or `None` for all rows; got"):
            many_comparisons().to_text(wrong)  # pyright: ignore[reportArgumentType]


def test_a_warning_does_not_name_a_hundred_metrics() -> None:
    assert many_comparisons(100, tolerance=0.0).exceeding().endswith("; and 84 more metrics")  # m0 does not differ


# -- modules ----------------------------------------------------------------------------------------------------------


def module_row(name: str, sqnr_db: float, varying: float = 60.0, epoch: int = 0) -> ModuleRow:
    return ModuleRow(epoch, 4, name, "Linear", 2, sqnr_db, varying, 1.0, 0.5)


def test_the_worst_come_first() -> None:
    table = ModuleTable(
        [module_row("a", 50.0), module_row("b", 40.0, 8.0), module_row("c", math.nan), module_row("", 20.0)]
    )
    assert_approved("modules", {"all": str(table), "two": table.to_text(max_rows=2), "empty": str(ModuleTable())})
    assert table.to_text(max_rows=None).splitlines()[1].startswith("a")


def test_rows_make_the_same_samples_again(tmp_path: Path) -> None:
    table = ModuleTable()
    table.add([module_row("a", 50.0), module_row("b", 40.0)])
    table.add([module_row("a", 51.0, epoch=1)])
    again = ModuleTable([ModuleRow(*values) for values in table])
    assert [*again] == [*table]
    assert again.last == table.last == [module_row("a", 51.0, epoch=1)]
    table.to_csv(tmp_path / "modules.csv")
    assert (tmp_path / "modules.csv").read_text().splitlines()[0].startswith("epoch,step,name,kind,num_calls,sqnr_db")
