"""One command runs the claims: it resumes, and a run that fails is a row with its error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks._machine import RESULTS
from benchmarks.claims.__main__ import main
from benchmarks.claims._claim import Interval, Outcome, Setting, overall
from benchmarks.claims._page import page
from benchmarks.claims._record import read
from benchmarks.claims.claims import bad_batch, claims, small_updates


def fails(setting: Setting) -> Outcome:
    raise ValueError("no luck")


def test_claims_run_once_and_an_error_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_updates, "CLAIM", dataclasses.replace(small_updates.CLAIM, run=fails))
    command = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "small_updates,bad_batch"]
    assert main(command) == 1
    monkeypatch.setattr(bad_batch, "CLAIM", dataclasses.replace(bad_batch.CLAIM, run=fails))
    assert main(command) == 1, "what is measured is not measured again"
    found = {record.name: record.verdict for record in read(tmp_path / "claims.json")}
    assert found == {"bad_batch": "depends", "small_updates": "failed"}
    assert "| failed | ValueError: no luck |" in (tmp_path / "claims.md").read_text()


def test_the_published_page_is_that_of_the_published_records() -> None:
    wanted = page(claims(), read(RESULTS / "claims.json"))
    assert (RESULTS / "claims.md").read_text("utf-8") == wanted, "run `python -m benchmarks.claims --page`"


def test_verdicts() -> None:
    assert [Interval.of([1.0, 1.2, 1.1]).within(low, 2.0) for low in (0.8, 1.1)] == ["reproduced", "undecided"]
    assert overall(["reproduced", "not reproduced"]) == "depends"
