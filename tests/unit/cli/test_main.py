"""The exit status and the printed line of every outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import lightning_amp
from lightning_amp.cli import _saved_scales, main
from lightning_amp.cli._errors import UsageError
from lightning_amp.cli._main import COMMANDS
from lightning_amp.cli._output import Outcome


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Make `scale x` return or raise an outcome."""

    def becomes(outcome: Any) -> None:
        def work(options: Any) -> Outcome:
            if isinstance(outcome, BaseException):
                raise outcome
            return Outcome("", has_work=outcome == 1)

        monkeypatch.setattr(_saved_scales, "run_scale", work)

    return becomes


@pytest.mark.parametrize(
    ("outcome", "status", "line"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (UsageError("`x` must be\n  less\n"), 2, "lightning-amp scale: `x` must be less\n"),
        (KeyboardInterrupt(), 130, "lightning-amp scale: interrupted\n"),
        (KeyboardInterrupt("interrupted; go on"), 130, "lightning-amp scale: interrupted; go on\n"),
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
    assert "--debug" in err


@pytest.mark.usefixtures("tests_are_ours")
@pytest.mark.parametrize("way", ["option", "environment"])
@pytest.mark.parametrize(("outcome", "status"), [(AttributeError("broken"), 70), (UsageError("wrong"), 2)])
def test_a_traceback_if_it_is_wanted(
    way: str,
    outcome: Exception,
    status: int,
    command: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command(outcome)
    if way == "environment":
        monkeypatch.setenv("LIGHTNING_AMP_DEBUG", "1")
    assert main(["scale", "x", *(["--debug"] if way == "option" else [])]) == status
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert str(outcome) in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "a command is missing"),
        (["scael"], "'scael' is no command; did you mean scale?"),
        (["comprae"], "'comprae' is no command; did you mean compare?"),
        (["nurse"], "'nurse' is no command"),
        (["--foo"], "'--foo' is no command"),
        (["--debug"], "a command is missing"),
    ],
)
def test_no_such_command(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err == f"lightning-amp: {what}; there are {', '.join(COMMANDS)} (`lightning-amp --help` says what they do)"


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
