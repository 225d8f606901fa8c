"""The rows of `GradientMonitor` as text: the worst ones, and words for values that are no numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.approved import assert_approved
from support.tables import gradient_row, hundred_gradients

from lightning_amp import GradientMonitor
from lightning_amp.findings import GradientRow, GradientSample
from lightning_amp.reports import GradientTable, _table, describe_gradient


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


def test_a_module_keeps_few_bits_if_two_samples_show_it() -> None:
    """A ReLU may change its sign in one small sample; a headroom of -0.04 is rounding, and nothing overflowed."""
    once, both, total = (usual(2, name, -0.04) for name in ("once", "both", "(all)"))
    rows = [once._replace(sqnr_db=8.0), both._replace(sqnr_db=20.0), total]
    before = [once, both._replace(sqnr_db=31.0), total]
    text = describe_gradient(GradientSample(rows), None, "", before)
    assert "keeps 8 of 11 bits (50 dB), in `both` 5 of 11 bits." in text
    assert "it fits, with 0 bits of room" in text
    assert "-0.0" not in str(GradientTable(rows))
    assert "(50 dB). At" in describe_gradient(GradientSample(rows), None, "", [])


@pytest.mark.parametrize("max_rows", [0, -1, True, 2.5])
def test_number_of_rows_is_checked(max_rows: Any) -> None:
    match = "`max_rows` must be an integer of 1 or more, or `None` for all rows; got"
    with pytest.raises(ValueError, match=match):
        GradientMonitor().table.to_text(max_rows)
