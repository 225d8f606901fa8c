"""The tables: sequences that print as text, save as CSV, and keep samples together; and the history of a scale."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from support.approved import assert_approved
from support.tables import comparisons, gradient_row, hundred_gradients, many_comparisons, scale_records

from lightning_amp.findings import GradientRow, GradientSample, StepRecord
from lightning_amp.reports import (
    ComparisonRow,
    ComparisonTable,
    GradientTable,
    ModuleRow,
    ModuleTable,
    ScaleHistory,
    _table,
    describe_comparison,
    describe_gradient,
)
from lightning_amp.reports._table import Table


def history() -> ScaleHistory:
    result = ScaleHistory()
    result.extend(scale_records({1: "gradient", 4: "loss"}, 9))
    return result


def gradients() -> GradientTable:
    return GradientTable([gradient_row(step, name) for step in (0, 3) for name in ("a", "b")])


def modules() -> ModuleTable:
    return ModuleTable([module_row(name, 50.0, epoch=epoch) for epoch in (0, 1) for name in ("a", "b")])


@pytest.mark.parametrize("make", [history, gradients, comparisons, modules])
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


@pytest.mark.parametrize("make", [gradients, modules])
def test_rows_of_a_checkpoint_are_sampled_as_they_were(make: Any) -> None:
    table, row = make(), gradient_row(7, "a") if make is gradients else module_row("a", 51.0, epoch=7)
    table.add([row])
    assert type(table)(table).last == table.last == [row]
    assert type(table)().last == []


def test_two_comparisons_at_one_step_are_two() -> None:
    """`trainer.validate()` may run twice at one step."""
    first, again = ([ComparisonRow.of(0, 0, name, amp, 1.0) for name in ("a", "b")] for amp in (2.0, 3.0))
    table = ComparisonTable()
    table.add(first)
    table.add(again)
    assert table.last == again
    assert ComparisonTable(table).last == again
    assert ComparisonTable([*table, ComparisonRow.of(0, 1, "a", 4.0, 1.0)]).last[0].amp == 4.0


# -- comparisons -------------------------------------------------------------------------------------------------------


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
    two = ComparisonTable(
        [ComparisonRow.of(0, 0, *one) for one in (("a", 1.1, 1.0), ("b", 2.0, 1.0))], tolerance={"a": 0.01}
    )
    assert "`b` differs most" in describe_comparison(two.worst_first(), None)
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


# -- gradients ---------------------------------------------------------------------------------------------------------


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


# -- the history of a scale --------------------------------------------------------------------------------------------


def test_a_module_keeps_few_bits_if_two_samples_show_it() -> None:
    """A ReLU may change its sign in one small sample; a headroom of -0.04 is rounding, and nothing overflowed."""
    once, both, total = (usual(2, name, -0.04) for name in ("once", "both", "(all)"))
    rows = [once._replace(sqnr_db=8.0), both._replace(sqnr_db=20.0), total]
    before = [once, both._replace(sqnr_db=31.0), total]
    text = describe_gradient(GradientSample(rows), None, "", before)
    assert "keeps 8 of 11 bits (50 dB), in `both` 3 of 11 bits." in text  # of the latest sample, as in the table
    assert "it fits, with 0 bits of room" in text
    assert "-0.0" not in str(GradientTable(rows))
    assert "(50 dB). At" in describe_gradient(GradientSample(rows), None, "", [])


def test_keeps_only_what_changed() -> None:
    history = ScaleHistory()
    history.extend(scale_records({3: "gradient", 5: "loss"}, 100))
    assert [r.index for r in history] == [0, 3, 5, 99]
    assert (history.num_attempted, history.num_skipped, history.num_steps) == (100, 2, 98)
    assert history.summary() == (
        "2 of 100 steps skipped, 2 in the first 20, 1 of them with a non-finite loss; scale 1024 -> 512"
    )


HEADER = b"index,optimizer_idx,scale,next_scale,skipped,reason,precision\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"", "the header must be"),
        (b"a,b\n1,2\n", "the header must be"),
        (HEADER + b"0,0,1", "line 2, is not a row"),
        (HEADER + b"0,0,1.0,1.0,0,none,fp16\n1,0,1.0,1.0,1,gradie", "line 3, is not a row"),
        (HEADER + b"0,0,nan,1.0,0,none,fp16\n", "line 2, is not a row"),
        (HEADER + b"0,0,1.0,1.0,0,none,fp16\n\xff\xfe\x00", "is not a row"),
    ],
)
def test_a_broken_csv_is_named(tmp_path: Path, text: bytes, where: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"broken\.csv.*({where})"):
        ScaleHistory.from_csv(path)


def test_an_empty_history() -> None:
    history = ScaleHistory()
    assert (len(history), list(history), history.num_attempted, history.last) == (0, [], 0, None)
    assert history.summary() == "no optimizer step was recorded"
    with pytest.raises(IndexError):
        history[0]


def test_precisions_come_back_from_a_file_and_a_checkpoint(tmp_path: Path) -> None:
    """The run was resumed in another precision."""
    history, again = ScaleHistory(), ScaleHistory()
    history.extend(StepRecord(i, 0, 8.0, 8.0, False, "none", "fp16") for i in range(6))
    history.extend(StepRecord(i, 0, 1.0, 1.0, False, "none", "bf16") for i in range(6, 16))
    assert [(r.index, r.precision) for r in history] == [(0, "fp16"), (5, "fp16"), (6, "bf16"), (15, "bf16")]
    assert history.summary() == "0 of 16 steps skipped; scale 8 -> 8"  # bf16 has none
    history.to_csv(tmp_path / "history.csv")
    assert (tmp_path / "history.csv").read_text().splitlines()[0].endswith(",reason,precision")
    assert list(ScaleHistory.from_csv(tmp_path / "history.csv")) == list(history)
    again.load_state_dict(history.state_dict())
    assert list(again) == list(history)
    (tmp_path / "history.csv").write_text((tmp_path / "history.csv").read_text().replace("bf16", "bf17"))
    with pytest.raises(ValueError, match="line 4, is not a row"):
        ScaleHistory.from_csv(tmp_path / "history.csv")
    state = history.state_dict()
    state["records"][0][-1] = "bf17"
    with pytest.raises(ValueError, match=r"ScaleHistory.records` must be the fields of a step"):
        again.load_state_dict(state)
