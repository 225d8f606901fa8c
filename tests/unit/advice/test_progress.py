"""The line of progress on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from lightning_amp.advice._doctor import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress() as say:
        say("a long text about the machine")
        say("short")
        shown = stream.getvalue().split("\r\033[K")
        assert shown == ["", "doctor: a long text about the machine (0 s)", "doctor: short (0 s)"]
    assert stream.getvalue().endswith("\r\033[K")


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_elsewhere_it_is_silent(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress() as say:
        say("anything")
    assert stream is None or stream.getvalue() == ""
