"""The table of `MetricComparison(by_module=True)`."""

from __future__ import annotations

import math
from pathlib import Path

from support.approved import assert_approved

from lightning_amp.reports import ModuleRow, ModuleTable


def row(name: str, sqnr_db: float, varying: float = 60.0, epoch: int = 0) -> ModuleRow:
    return ModuleRow(epoch, 4, name, "Linear", 2, sqnr_db, varying, 1.0, 0.5)


def test_the_worst_come_first() -> None:
    table = ModuleTable([row("a", 50.0), row("b", 40.0, 8.0), row("c", math.nan), row("", 20.0)])
    assert_approved("modules", {"all": str(table), "two": table.to_text(max_rows=2), "empty": str(ModuleTable())})
    assert table.to_text(max_rows=None).splitlines()[1].startswith("a")


def test_rows_make_the_same_samples_again(tmp_path: Path) -> None:
    table = ModuleTable()
    table.add([row("a", 50.0), row("b", 40.0)])
    table.add([row("a", 51.0, epoch=1)])
    again = ModuleTable([ModuleRow(*values) for values in table])
    assert [*again] == [*table]
    assert again.last == table.last == [row("a", 51.0, epoch=1)]
    table.to_csv(tmp_path / "modules.csv")
    assert (tmp_path / "modules.csv").read_text().splitlines()[0].startswith("epoch,step,name,kind,num_calls,sqnr_db")
