"""The exit status and the printed line of every outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import lightning_amp
from lightning_amp.cli import main
from lightning_amp.cli._commands import COMMANDS
from lightning_amp.cli._output import Outcome, UsageError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Make `scale x` return or raise an outcome."""

    def becomes(outcome: Any) -> None:
        def work(options: Any) -> Outcome:
            if isinstance(outcome, BaseException):
                raise outcome
            return Outcome("", has_work=outcome == 1)

        monkeypatch.setitem(COMMANDS, "scale", COMMANDS["scale"]._replace(run=work))

    return becomes


@pytest.mark.parametrize(
    ("outcome", "status", "line"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (UsageError("`x` must be\n  less\n"), 2, "lightning-amp scale: `x` must be less\n"),
        (KeyboardInterrupt(), 130, "lightning-amp scale: interrupted\n"),
    ],
)
def test_statuses(
    outcome: Any, status: int, line: str, command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(outcome)
    assert main(["scale", "x"]) == status
    assert capsys.readouterr() == ("", line)


@pytest.mark.usefixtures("tests_are_ours")
def test_a_crash_is_nothing_to_do_and_no_traceback(
    command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(AttributeError("two\nlines"))
    assert main(["scale", "x"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("lightning-amp scale: this is an error of lightning-amp itself: AttributeError: two lines.")
    assert "LIGHTNING_AMP_DEBUG=1" in err


@pytest.mark.usefixtures("tests_are_ours")
@pytest.mark.parametrize(("outcome", "status"), [(AttributeError("broken"), 70), (UsageError("wrong"), 2)])
def test_a_traceback_if_it_is_wanted(
    outcome: Exception,
    status: int,
    command: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command(outcome)
    monkeypatch.setenv("LIGHTNING_AMP_DEBUG", "1")
    assert main(["scale", "x"]) == status
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert str(outcome) in err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [[], ["scael"]])
def test_no_such_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("lightning-amp: ")
    assert err.count("\n") == 1
    assert [name for name in [*COMMANDS, *arguments] if name not in err] == []
    assert ("did you mean scale?" in err) == (arguments == ["scael"])


def test_the_help_has_every_command_and_the_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name}" in out for name in COMMANDS)
    assert "2 wrong use" in out
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_fits_into_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: lightning-amp {name} ")
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-amp {lightning_amp.__version__}\n"
