"""What a comparison says while it runs."""

from __future__ import annotations

import io
import sys

import pytest

from lightning_amp.comparison._progress import progress
from lightning_amp.verdicts._arm_run import ArmRun


def test_a_line_for_each_run_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(3) as shown:
        shown.begin("fp32", 0)
        shown.move(0.5, "epoch 1/2")
        shown.end(ArmRun("fp32", 0, total_s=12.4))
        shown.end(ArmRun("bf16", 0, total_s=1.0), kept=True)
        shown.end(ArmRun("fp16", 0, error="ValueError: two\nlines"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "[1/3] fp32, seed 0: 12 s",
        "[2/3] bf16, seed 0: kept from before",
        "[3/3] fp16, seed 0: failed: ValueError: two lines",
    ]


def test_a_number_of_runs_that_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(3) as shown:
        shown.start("fp32, batch size 8")
        shown.finish("fp32, batch size 8: 3 GiB")
        shown.expect(2)
        shown.finish("fp32, batch size 16: 5 GiB")
        shown.finish("one that nobody expected")
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] fp32, batch size 8: 3 GiB", "[2/2] fp32, batch size 16: 5 GiB",
        "[3/3] one that nobody expected",
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(2) as shown:
        shown.begin("fp32 [bold]", 0)
        shown.end(ArmRun("fp32 [bold]", 0, total_s=12.4))
        shown.begin("bf16", 0)
        shown.move(0.5, "epoch 1/2")
    return terminal.getvalue()


def test_a_bar_with_the_arm_its_epoch_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_terminal(monkeypatch)
    assert "fp32 [bold], seed 0: 12 s" in text
    assert "bf16, seed 0: epoch 1/2" in text
    assert "left" in text


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert on_terminal(monkeypatch) == "[1/2] fp32 [bold], seed 0: 12 s\n"
