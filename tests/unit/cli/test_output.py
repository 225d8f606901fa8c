"""Printing and saving of results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._output import check_output, json_writer, save, show, write


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_markdown_as_it_is_in_a_pipe_and_laid_out_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Use `fp16`.\n\n| arm | speed |\n| --- | --- |\n| fp16 | 1.8x |\n"
    show(text)
    assert capsys.readouterr().out == text
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(text)
    out = capsys.readouterr().out
    assert "Use fp16." in out
    assert "|" not in out
    assert out.index("arm") < out.index("speed")


def test_a_narrow_encoding_gets_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        show("naïve\n")
    assert (tmp_path / "out").read_text() == "na?ve\n"


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        encoding = "utf-8"

        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(UsageError, match="output cannot be written: .*No space left"):
        write("text")


# -- files -------------------------------------------------------------------------------------------------------------


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
