"""The progress of a comparison, as it is shown while it runs."""

from __future__ import annotations

import io
import sys
import time

import pytest

from lightning_amp.compare import Progress


def test_a_line_for_each_run_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3) as shown:
        shown.set_description("fp32, seed 0")
        shown.tick()
        shown.finish("fp32, seed 0: 12 s")
        shown.finish("bf16, seed 0: kept from before")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "[1/3] fp32, seed 0: 12 s",
        "[2/3] bf16, seed 0: kept from before",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_with_the_arm_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(2) as shown:
        shown.set_description("fp32 [bold], seed 0")
        shown.finish("fp32 [bold], seed 0: 12 s")
        shown.set_description("bf16, seed 0")
        time.sleep(0.2)
        shown.tick()
    text = terminal.getvalue()
    assert "[1/2] fp32 [bold], seed 0: 12 s\n" in text
    assert "bf16, seed 0:  50%" in text
    assert "1/2 [00:0" in text
