"""Printing and saving of results."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from lightning_amp._plain_data import Table
from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._output import (
    check_output,
    json_writer,
    laid_out,
    note,
    output_width,
    paragraph,
    require_extra,
    save,
    show,
    table,
    write,
)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


HEADER = ("run", "steps", "share")
ROWS = [("a", "1,000", "50 %"), ("a long name of a run", "7", "-")]


def test_a_table_is_aligned_and_has_no_lines_and_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    show([Text("before", style="bold red"), "", table(HEADER, ROWS)])
    assert capsys.readouterr().out.splitlines() == [
        "before",
        "",
        "run                   steps  share",
        "a                     1,000   50 %",
        "a long name of a run      7      -",
    ]


@pytest.mark.parametrize("width", [20, 24, 30])
def test_what_is_too_wide_is_wrapped_and_nothing_is_lost(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show([table(HEADER, ROWS)])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    letters = "".join("".join(lines).split())
    assert sorted(letters) == sorted("".join("".join(cell.split()) for row in (HEADER, *ROWS) for cell in row))


def test_markup_in_names_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    show([table(("[red]", ":smile:"), [("[/x]", "[bold]1[/bold]")])])
    assert capsys.readouterr().out.split() == ["[red]", ":smile:", "[/x]", "[bold]1[/bold]"]


def test_lines_are_not_longer_than_a_person_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert output_width() == 300
    show([paragraph("word " * 100)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize(("variable", "colored"), [("", False), ("FORCE_COLOR", True), ("NO_COLOR", False)])
def test_colour_only_where_it_is_wanted(
    variable: str, colored: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if variable:
        monkeypatch.setenv(variable, "1")
    show([Text("red", style="red")])
    assert ("\x1b[31m" in capsys.readouterr().out) == colored


def test_a_narrow_encoding_gets_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        show(["naïve"])
    assert (tmp_path / "out").read_text() == "na?ve\n"


def test_a_closed_pipe_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", file)
    with pytest.raises(BrokenPipeError):
        write("text")
    with pytest.raises(BrokenPipeError):
        file.close()


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        encoding = "utf-8"

        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(UsageError, match="output cannot be written: .*No space left"):
        write("text")


def test_a_note_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    note("left out")
    assert capsys.readouterr() == ("", "left out\n")


def test_a_missing_extra_is_named() -> None:
    require_extra("json", "rich")
    with pytest.raises(UsageError, match=r"this needs no_such_library, .* run `pip install .*rich`"):
        require_extra("json", "no_such_library")


# -- files -------------------------------------------------------------------------------------------------------------


def test_json_has_no_nan(tmp_path: Path) -> None:
    data: Any = {"a": [1.0, math.nan, (math.inf, -math.inf)], "b": {"c": None, 3: True}}
    save("--json", str(tmp_path / "new" / "x.json"), json_writer(data))
    text = (tmp_path / "new" / "x.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [1.0, None, [None, None]], "b": {"c": None, "3": True}}
    assert text.endswith("}\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such pipes")
def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    """An atomic write would replace `/dev/stdout`."""
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    save("--json", str(tmp_path / "pipe"), json_writer([1]))
    assert os.read(reading, 100) == b"[\n 1\n]\n"
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "target")
    save("--json", str(tmp_path / "link.json"), json_writer(1))
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "target").read_text() == "1\n"


def test_a_writer_that_adds_a_suffix(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    save("--plot", str(tmp_path / "link"), lambda path: Path(f"{path}.png").write_text("picture"))
    assert (tmp_path / "target").read_text() == "picture"


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("no such format"), ImportError("no matplotlib")])
def test_what_cannot_be_written_is_wrong_use(error: Exception, tmp_path: Path) -> None:
    def fails(path: str) -> None:
        raise error

    with pytest.raises(UsageError, match=f"--plot .*x.png cannot be written: {error}"):
        save("--plot", str(tmp_path / "x.png"), fails)


@pytest.mark.parametrize("path", ["", "-", "."])
def test_what_is_no_file_is_refused_before_any_work(path: str) -> None:
    with pytest.raises(UsageError, match=r"--json must be a file, got .*/dev/stdout"):
        check_output("--json", path)


def test_an_unknown_protocol_is_refused_before_any_work() -> None:
    with pytest.raises(UsageError, match="or a URL of fsspec"):
        check_output("--json", "s4://bucket/x.json")
    check_output("--json", None)
    check_output("--json", "memory://x.json")
    check_output("--json", "/dev/stdout")


# -- blocks of a report ------------------------------------------------------------------------------------------------

ARMS = [["fp32", "32-true", "-", "12.0 MiB"], ["fp16, a | b", "16-mixed", "1.8x as fast", "8.0 MiB"]]
REPORT = [
    "Use `fp16`: it is **fast**.",
    Table(["arm", "ran as", "speed", "peak memory"], ARMS),
    "Ran on a CPU.",
]


def shown(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    show(laid_out(REPORT))
    return capsys.readouterr().out.splitlines()


def test_a_table_that_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(80, monkeypatch, capsys) == [
        "Use fp16: it is fast.",
        "",
        "arm          ran as    speed         peak memory",
        "fp32         32-true   -             12.0 MiB",
        "fp16, a | b  16-mixed  1.8x as fast  8.0 MiB",
        "",
        "Ran on a CPU.",
    ]


def test_one_that_does_not_is_turned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(40, monkeypatch, capsys)[2:6] == [
        "arm          fp32      fp16, a | b",
        "ran as       32-true   16-mixed",
        "speed        -         1.8x as fast",
        "peak memory  12.0 MiB  8.0 MiB",
    ]


def test_one_that_never_fits_is_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(25, monkeypatch, capsys)
    assert all(len(line) <= 25 for line in lines)
    assert "".join("".join(lines).split()).count("|") == 1
