"""The rows of `GradientMonitor` as text: the worst ones, and words for values that are no numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.tables import gradient_row, hundred_gradients

from lightning_amp import GradientMonitor
from lightning_amp.findings import GradientRow
from lightning_amp.reports import GradientTable, _table


def usual(step: int, name: str, room: float = 3.0) -> GradientRow:
    return GradientRow(step, name, 1.0, 10, 0.1, 0.2, room, 50.0, 0.999, 1.0, 1.0, "fp16")


def test_table_prints_the_latest_sample_the_worst_first() -> None:
    table = GradientTable([usual(0, "old"), usual(1, "b", 5.0), usual(1, "a", -1.0), usual(1, "(all)", -1.0)])
    assert str(table).splitlines() == [
        "name   to zero  subnormal   headroom         keeps     SQNR  cosine",
        "a        10.0%      20.0%  -1.0 bits  8 of 11 bits  50.0 dB  0.9990",
        "b        10.0%      20.0%   5.0 bits  8 of 11 bits  50.0 dB  0.9990",
        "(all)    10.0%      20.0%  -1.0 bits  8 of 11 bits  50.0 dB  0.9990",
    ]
    assert table[0].name == "old"
    assert len(table[1:]) == 3


def test_table_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_table, "_MAX_SAMPLES", 8)
    table = GradientTable()
    for step in range(100):
        table.add([usual(step, "a"), usual(step, "(all)")])
    steps = [r.step for r in table if r.name == "a"]
    assert len(steps) <= 8
    assert steps[0] == 0
    assert steps[-4:] == [96, 97, 98, 99]


def test_a_table_has_the_15_worst_rows_and_says_how_to_see_all() -> None:
    rows = [row._replace(precision="fp16") for row in [*hundred_gradients(), gradient_row(0, "(all)")]]
    table = GradientTable(rows)
    lines = str(table).splitlines()
    names = [line.split()[0] for line in lines[1:-2]]
    assert len(names) == 15
    assert names[:3] == ["layer.40", "layer.50", "layer.60"]
    assert lines[-2].startswith("(all)")
    assert lines[-1] == ("These are the 15 worst of 100; `print(monitor.table.to_text(max_rows=None))` shows all.")
    assert len(table.to_text(max_rows=None).splitlines()) == 102
    assert "worst of" not in table.to_text(max_rows=None)
    assert len(table.to_text(3).splitlines()) == 6


def test_a_small_table_is_whole() -> None:
    table = GradientTable([gradient_row(0, f"layer.{i}") for i in range(15)])
    assert len(str(table).splitlines()) == 16


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_values_that_are_no_numbers_are_written_as_words(precision: str) -> None:
    nan: dict[str, Any] = {"sqnr_db": math.nan, "cosine": math.nan}
    rows = [
        gradient_row(0, "zero", num_values=0, largest=0.0, headroom_bits=math.inf, sqnr_db=math.inf),
        gradient_row(0, "over", **nan),
        gradient_row(0, "nan", headroom_bits=math.nan, largest=math.nan, **nan),
        gradient_row(0, "none", sqnr_db=-math.inf, cosine=0.0),
        gradient_row(0, "same", sqnr_db=math.inf, cosine=1.0),
    ]
    header, *lines = str(GradientTable([row._replace(precision=precision) for row in rows])).splitlines()
    assert ("headroom" in header, "to zero" in header) == ((True, True) if precision == "fp16" else (False, False))
    words = {line.split()[0]: line for line in lines}
    assert "overflow" in words["over"]
    assert "not finite in fp32" in words["nan"]
    assert "zero in fp32" in words["none"]
    assert "equal" in words["same"]
    assert "all zero" in words["zero"]
    assert "zero" in list(words)[-2:]
    if precision == "bf16":
        assert words["same"].split() == ["same", "8", "of", "8", "bits", "equal", "1.0000"]


@pytest.mark.parametrize("max_rows", [0, -1, True, 2.5])
def test_number_of_rows_is_checked(max_rows: Any) -> None:
    match = "`max_rows` must be an integer of 1 or more, or `None` for all rows; got"
    with pytest.raises(ValueError, match=match):
        GradientMonitor().table.to_text(max_rows)


def test_repr_and_an_empty_table() -> None:
    assert repr(GradientTable([gradient_row(0, "a"), gradient_row(1, "a")])) == "GradientTable(2 rows)"
    assert str(GradientTable()) == "no sample yet"
