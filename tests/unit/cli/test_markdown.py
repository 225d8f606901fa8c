"""Markdown on a terminal."""

from __future__ import annotations

import pytest

from lightning_amp.cli._markdown import markdown
from lightning_amp.cli._output import show

TEXT = r"""Use `fp16`: it is **fast**.

| arm | ran as | speed | peak memory |
| --- | --- | --- | --- |
| fp32 | 32-true | - | 12.0 MiB |
| fp16, a \| b | 16-mixed | 1.8x as fast | 8.0 MiB |

Ran on a CPU.
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def shown(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    show(markdown(TEXT))
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
