"""One command collects the results that need a GPU: it resumes, and never takes a rehearsal for evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _processes
from benchmarks._machine import RESULTS, Machine
from benchmarks.evidence._collection import Collection
from benchmarks.evidence._page import page
from benchmarks.evidence._parts import Part
from benchmarks.evidence._record import read

MACHINE = Machine("a device", ("torch 2.11.0",))


def test_what_a_part_printed_is_on_the_page_and_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {"one": "print('a figure')", "two": "import sys; print('on the way'); sys.exit('no luck')"}
    wanted = [Part(name, ("-c", code), 10.0) for name, code in codes.items()]
    Collection(MACHINE, tmp_path, commit="abc", limit_s=600.0).go(wanted, retry=False)
    assert [(r.status, r.reason) for r in read(tmp_path / "gpu.json")] == [
        ("done", ""), ("failed", "its process ended with status 1: no luck"),
    ]  # fmt: skip
    text = (tmp_path / "gpu.md").read_text()
    assert text == page(read(tmp_path / "gpu.json"))
    for words in ("## a device", "### One", "\na figure\n", "\non the way\nno luck\n"):
        assert words in text
    monkeypatch.setattr(_processes, "wait", lambda *args: pytest.fail("a process was started"))
    Collection(MACHINE, tmp_path, commit="abc", limit_s=600.0).go(wanted, retry=False)


def test_the_published_page_is_that_of_the_published_records() -> None:
    text = (RESULTS / "gpu.md").read_text(encoding="utf-8")
    assert text == page(read(RESULTS / "gpu.json")), "run `python -m benchmarks.evidence --page-only`"
