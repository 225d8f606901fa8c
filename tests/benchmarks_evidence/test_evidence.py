"""One command collects the results that need a GPU: it resumes, stops in time, and never takes a rehearsal for
evidence.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import _processes
from benchmarks._machine import RESULTS, Machine, why_not_there
from benchmarks.evidence import __main__
from benchmarks.evidence.__main__ import commit_here, main
from benchmarks.evidence._collection import Collection
from benchmarks.evidence._page import page
from benchmarks.evidence._parts import Part, comparison_page, parts
from benchmarks.evidence._printed import results_of_tests
from benchmarks.evidence._record import Record, read

MACHINE = Machine("a device", ("torch 2.11.0",))
REPORT = """
<testsuites><testsuite>
<testcase name="test_right"/>
<testcase name="test_wrong[fp16]"><failure message="short">first line
E   assert 1 == 2
last line</failure></testcase>
<testcase name="test_two_devices"><skipped message="needs two CUDA devices"/></testcase>
</testsuite></testsuites>
"""


def part(name: str, code: str = "print('a figure')", estimated_s: float = 10.0, **fields: object) -> Part:
    return Part(name, ("-c", code), estimated_s)._replace(**fields)


def collect(out: Path, wanted: list[Part], *, limit_s: float = 600.0, retry: bool = False) -> dict[str, Record]:
    Collection(MACHINE, out, commit="abc", limit_s=limit_s).go(wanted, retry=retry)
    return {record.part: record for record in read(out / "gpu.json")}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace each part's process by one that ends at once with the given status."""
    codes: list[str] = []

    def end(command: list[str], output: int, errors: int, limit_s: float) -> int | None:
        codes.append(command[-1])
        return {"hangs": None, "differs": 1, "breaks": 3}.get(command[-1], 0)

    monkeypatch.setattr(_processes, "wait", end)
    return codes


# -- the collection ----------------------------------------------------------------------------------------------------


def test_what_a_part_printed_is_on_the_page_with_where_it_comes_from(tmp_path: Path) -> None:
    wanted = [part("one"), part("two", "import sys; print('on the way'); sys.exit('no luck')")]
    records = collect(tmp_path, wanted)
    assert [(r.status, r.reason) for r in records.values()] == [
        ("done", ""), ("failed", "its process ended with status 1: no luck"),
    ]  # fmt: skip
    text = (tmp_path / "gpu.md").read_text()
    assert text == page(read(tmp_path / "gpu.json"))
    for words in ("## a device", "With torch 2.11.0.", "### One", "\na figure\n", "\non the way\nno luck\n"):
        assert words in text
    assert re.search(r"^\d{4}-\d\d-\d\d, commit abc: `python -c ", text, re.MULTILINE)
    assert "rehearsal" not in text.lower()


def test_what_is_on_record_is_not_done_again(tmp_path: Path, started: list[str]) -> None:
    wanted = [part(name, name, results=(0, 1)) for name in ("works", "differs", "breaks", "hangs")]
    wanted += [part("lacks", missing="it is not installed")]
    statuses = {name: record.status for name, record in collect(tmp_path, wanted).items()}
    assert statuses == {
        "works": "done", "differs": "found wrong", "breaks": "failed", "hangs": "took too long", "lacks": "not there",
    }  # fmt: skip
    started.clear()
    collect(tmp_path, wanted)
    assert started == []
    collect(tmp_path, [*wanted[:4], part("lacks", "lacks")])  # the part is there now
    assert started == ["lacks"]
    started.clear()
    collect(tmp_path, wanted[:4], retry=True)
    assert started == ["differs", "breaks", "hangs"]


def test_an_exception_is_no_result(tmp_path: Path) -> None:
    crash, finding = "raise ValueError('no luck')", "import sys; print('2 differ'); sys.exit(1)"
    records = collect(tmp_path, [part("crash", crash, results=(0, 1)), part("finding", finding, results=(0, 1))])
    assert (records["crash"].status, records["finding"].status) == ("failed", "found wrong")
    assert "ValueError: no luck" in records["crash"].text
    assert "2 differ" in records["finding"].text


def test_another_machine_and_a_rehearsal_have_records_of_their_own(tmp_path: Path, started: list[str]) -> None:
    collect(tmp_path, [part("one", "one")])
    for machine in (MACHINE._replace(device="another"), MACHINE._replace(tiny=True)):
        Collection(machine, tmp_path, commit="abc", limit_s=60.0).go([part("one", "one")])
    assert len(started) == 3
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("\n## ") == 3
    assert text.index("**A rehearsal: no figure") > text.index("## another")


def test_no_part_is_started_that_would_not_end_in_time(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [part("short", "short", 10.0), part("long", "long", 100.0), part("after", "after", 1.0)]
    collect(tmp_path, wanted, limit_s=60.0)
    assert started == ["short"]
    assert "Time is up, with 2 parts left. The same command goes on." in capsys.readouterr().out
    collect(tmp_path, wanted, limit_s=120.0)
    assert started == ["short", "long", "after"]


def test_a_part_that_takes_too_long_is_on_record_unless_it_was_the_call_that_ended(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # 25 s, then 30 s are left: less than the 60 s that a part needs
    assert collect(tmp_path, [part("hangs", "hangs", 20.0)], limit_s=25.0) == {}
    assert "Time was up in the middle of hangs" in capsys.readouterr().out
    assert collect(tmp_path, [part("hangs", "hangs", 20.0)])["hangs"].reason == "it was ended after 60 s"


def test_of_tests_the_page_has_the_last_lines_of_those_that_failed(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(REPORT)
    text = results_of_tests(tmp_path)
    assert text.startswith("1 test passed, 1 failed, 1 skipped.")
    assert "- 1 skipped: needs two CUDA devices" in text
    assert "`test_wrong[fp16]`\n\n````text\nfirst line\nE   assert 1 == 2\nlast line\n````" in text


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_tests_come_first_and_every_part_fits_into_one_call() -> None:
    wanted = parts("cuda", tiny=False)
    files = [f"tests: {path.name}" for path in sorted((RESULTS.parents[1] / "tests" / "gpu").glob("test_*.py"))]
    assert [p.name for p in wanted] == [
        *files, "waits per step", "the optimizer step", "the headline's first rows", "precisions compared",
        "the doctor", "fp8 against bf16",
    ]  # fmt: skip
    assert max(p.estimated_s for p in wanted) < 540
    assert all(p.estimated_s <= p.limit_s <= 500 for p in wanted)


@pytest.mark.parametrize("tiny", [False, True])
def test_a_shown_command_names_no_folder_of_this_machine_and_there_are_at_most_eight_files(
    tmp_path: Path, tiny: bool
) -> None:
    wanted = parts("cuda", tiny=tiny)
    files = {"gpu.json", "gpu.md", "headline.md"}
    for one in wanted:
        assert not re.search(r"[{}]| /|=/", one.shown())
        files |= {Path(word).name for word in one.command(tmp_path, Path("work")) if word.startswith(str(tmp_path))}
    assert files == {"gpu.json", "gpu.md", "headline.md", "headline.json", comparison_page(tiny=tiny)}


def test_a_rehearsal_takes_the_smallest_of_everything_on_the_device_that_is_there() -> None:
    for one in parts("cuda", tiny=True)[2:]:
        assert "--tiny --device cuda" in one.shown()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_says_whether_something_was_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter(["print(1)", "import sys; sys.exit(1)"])
    monkeypatch.setattr(__main__, "parts", lambda *args, **kwargs: [part(name := next(codes), name, 1.0)])
    command = ["--tiny", "--out", str(tmp_path), "--commit", "abc"]
    assert main(command) == 0
    assert main(command) == 1
    assert [(r.machine.tiny, r.commit) for r in read(tmp_path / "gpu.json")] == [(True, "abc")] * 2


def test_the_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "ROOT", tmp_path)
    assert commit_here() == "unknown"
    for command in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", commit_here())


def test_a_rehearsal_is_never_written_among_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    for out in (RESULTS, RESULTS / "evidence", Path("docs/results/..", "results")):
        assert why_not_there(out.resolve(), tiny=True) != ""
        assert why_not_there(out.resolve(), tiny=False) == ""
    assert main(["--tiny", "--out", str(RESULTS / "evidence")]) == 2
    assert "is a rehearsal" in capsys.readouterr().err
    assert not (RESULTS / "evidence").exists()


def test_evidence_needs_a_device_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "Next step: `--tiny`" in capsys.readouterr().err
    assert main(["--tiny", "--out", str(tmp_path), "--limit-minutes", "0.5"]) == 2
    assert "the headline's first rows takes about" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_plan_is_printed_with_its_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ 5\.5 min  the headline's first rows: python -m benchmarks\.headline ", printed, re.MULTILINE)
    assert "minutes on an H200" in printed


def test_the_published_page_is_that_of_the_published_records() -> None:
    text = (RESULTS / "gpu.md").read_text(encoding="utf-8")
    assert text == page(read(RESULTS / "gpu.json")), "run `python -m benchmarks.evidence --page-only`"
