"""The file of records keeps each measurement, survives a torn last line, and refuses another plan's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks._machine import Machine
from benchmarks.headline._plan import Run
from benchmarks.headline._records import Outcome, Record, append, read, write

MACHINE = Machine("a device", ("torch 2.11.0",))
MEMORY = {"weights": 1, "gradients": 2, "states": 4, "peak": 10}
FULL = Outcome("measured", "", (3.0, 2.0, 4.0), 29, MEMORY, "device", 10**15, 0.5, 1.0, 2.5, 7, "transformers 5", 9.5)
RECORDS = [
    Record(MACHINE, Run("gpt2", "fp32", 12, 1024), FULL, "2026-11-22"),
    Record(MACHINE, Run("gpt2", "bf16", 12, 1024, True), Outcome("does not fit", "out of memory"), "2026-11-22"),
]


def test_they_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path / "records.json", RECORDS)
    assert read(tmp_path / "records.json") == RECORDS
    assert len(json.loads((tmp_path / "records.json").read_text())) == 2  # the whole file is JSON
    assert read(tmp_path / "none.json") == []
    assert FULL.activations == 3
    assert RECORDS[1].outcome.activations is None


def test_one_is_added_and_one_of_the_same_run_replaced(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    for record in RECORDS:
        append(path, record)
    assert read(path) == RECORDS
    again = RECORDS[0]._replace(outcome=Outcome("failed", "a reason"))
    append(path, again)
    assert read(path) == [RECORDS[1], again]
    elsewhere = RECORDS[1]._replace(machine=Machine("another device", ()))
    append(path, elsewhere)
    assert read(path) == [RECORDS[1], again, elsewhere]


def test_a_torn_last_line_is_left_out_and_the_next_write_mends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    write(path, RECORDS)
    path.write_text(path.read_text()[:-40])
    assert read(path) == RECORDS[:1]
    append(path, RECORDS[1])
    assert read(path) == RECORDS


def test_another_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    write(path, RECORDS)
    lines = path.read_text().splitlines()
    for broken in ("{", '{"model": "gpt2"}', lines[1].replace('"status"', '"state"')):
        path.write_text("\n".join([lines[0], broken, *lines[2:]]))
        with pytest.raises(ValueError, match=r"Line 2 of .*records\.json must be a record .* Remove the line"):
            read(path)
