"""The rows of `GradientMonitor` as text: the worst ones, and words for values that are no numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.approved import assert_approved
from support.tables import gradient_row, hundred_gradients

from lightning_amp.findings import GradientRow
from lightning_amp.reports import GradientTable, _table


def usual(step: int, name: str, room: float = 3.0) -> GradientRow:
    return GradientRow(step, name, 1.0, 10, 0.1, 0.2, room, 50.0, 0.999, 1.0, 1.0, "fp16")


def test_table_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_table, "_MAX_SAMPLES", 8)
    table = GradientTable()
    for step in range(100):
        table.add([usual(step, "a"), usual(step, "(all)")])
    steps = [r.step for r in table if r.name == "a"]
    assert len(steps) <= 8
    assert steps[0] == 0
    assert steps[-4:] == [96, 97, 98, 99]


def test_printed_tables() -> None:
    """The latest sample, the worst first; 15 rows at most; and words for values that are no numbers."""
    nan: dict[str, Any] = {"sqnr_db": math.nan, "cosine": math.nan}
    odd = [
        gradient_row(0, "zero", num_values=0, largest=0.0, headroom_bits=math.inf, sqnr_db=math.inf),
        gradient_row(0, "over", **nan),
        gradient_row(0, "nan", headroom_bits=math.nan, largest=math.nan, **nan),
        gradient_row(0, "none", sqnr_db=-math.inf, cosine=0.0),
        gradient_row(0, "same", sqnr_db=math.inf, cosine=1.0),
    ]
    usual_rows = [usual(0, "old"), usual(1, "b", 5.0), usual(1, "a", -1.0), usual(1, "(all)", -1.0)]
    many = [row._replace(precision="fp16") for row in [*hundred_gradients(), gradient_row(0, "(all)")]]
    tables = {
        "fp16": usual_rows, "no numbers, fp16": [row._replace(precision="fp16") for row in odd],
        "no numbers, bf16": [row._replace(precision="bf16") for row in odd], "a hundred modules": many, "empty": [],
    }  # fmt: skip
    assert_approved("gradient_monitor", {case: str(GradientTable(rows)) for case, rows in tables.items()})
    assert len(GradientTable(many).to_text(max_rows=None).splitlines()) == 102
    assert len(GradientTable(many).to_text(3).splitlines()) == 6
    assert repr(GradientTable(many)) == "GradientTable(101 rows)"
