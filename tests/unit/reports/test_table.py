"""Properties of all three tables: they are sequences, save as CSV, and keep samples together."""

from __future__ import annotations

import csv
from pathlib import Path

import fsspec
import pytest
from support.tables import comparisons, gradient_row, scale_records

from lightning_amp.reports import ComparisonRow, ComparisonTable, GradientTable, ScaleHistory
from lightning_amp.reports._table import Table, aligned


def history() -> ScaleHistory:
    result = ScaleHistory()
    result.extend(scale_records({1: "gradient", 4: "loss"}, 9))
    return result


def gradients() -> GradientTable:
    return GradientTable([gradient_row(step, name) for step in (0, 3) for name in ("a", "b")])


@pytest.mark.parametrize("make", [history, gradients, comparisons])
def test_a_table_is_a_sequence(make: object, tmp_path: Path) -> None:
    table = make()  # type: ignore[operator]
    assert isinstance(table, Table)
    rows = list(table)
    assert len(table) == len(rows) > 3
    assert [table[i] for i in range(-len(rows), len(rows))] == rows * 2
    assert table[1:3] == rows[1:3]
    assert table[::-1] == list(reversed(table)) == rows[::-1]
    assert rows[2] in table
    assert table.index(rows[2]) == 2
    for outside in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            table[outside]
    assert repr(table).startswith(f"{type(table).__name__}({len(rows)} r")
    table.to_csv(tmp_path / "new" / "table.csv")
    with (tmp_path / "new" / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert [float(line["scale"]) for line in lines if "scale" in line] == [r.scale for r in rows if hasattr(r, "scale")]


@pytest.mark.parametrize("make", [history, gradients, comparisons])
def test_a_table_at_a_url(make: object, tmp_path: Path, folder_url: str) -> None:
    table = make()  # type: ignore[operator]
    table.to_csv(tmp_path / "table.csv")
    table.to_csv(f"{folder_url}/table.csv")
    with fsspec.open(f"{folder_url}/table.csv", "rb") as file:
        assert file.read() == (tmp_path / "table.csv").read_bytes()


def test_rows_of_a_checkpoint_are_sampled_as_they_were() -> None:
    table = gradients()
    table.add([gradient_row(7, "a")])
    assert GradientTable(table).last == table.last == [gradient_row(7, "a")]
    assert GradientTable().last == []


def test_two_comparisons_at_one_step_are_two() -> None:
    """`trainer.validate()` may run twice at one step."""
    first, again = ([ComparisonRow.of(0, 0, name, amp, 1.0) for name in ("a", "b")] for amp in (2.0, 3.0))
    table = ComparisonTable()
    table.add(first)
    table.add(again)
    assert table.last == again
    assert ComparisonTable(table).last == again
    assert ComparisonTable([*table, ComparisonRow.of(0, 1, "a", 4.0, 1.0)]).last[0].amp == 4.0


def test_text_is_aligned() -> None:
    lines = [("name", "value"), ("a", "1.5"), ("longer", "")]
    assert aligned(lines).splitlines() == ["name    value", "a         1.5", "longer"]
