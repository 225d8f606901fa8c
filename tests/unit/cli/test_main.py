"""The exit status and the printed line of every outcome, and results that are printed and saved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_amp
from lightning_amp._arguments import require
from lightning_amp.cli import main
from lightning_amp.cli._commands import COMMANDS
from lightning_amp.cli._output import (
    Outcome,
    UsageError,
    as_options,
    check_output,
    save,
    show,
    usage_error,
)


def noted(error: Exception) -> Exception:
    vars(error)["__notes__"] = ["Do this."]  # as `add_note` of Python 3.11 does
    return error


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
        (noted(UsageError("`x` fails")), 2, "lightning-amp scale: `x` fails Do this.\n"),
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


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_of_every_command_fits_into_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: lightning-amp {name} ") or not name
    if not name:
        assert all(f"    {command}" in out for command in COMMANDS)
        assert "2 wrong use" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-amp {lightning_amp.__version__}\n"


# -- printing ----------------------------------------------------------------------------------------------------------


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


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("no such format"), ImportError("no matplotlib")])
def test_what_cannot_be_written_is_wrong_use(error: Exception, tmp_path: Path) -> None:
    def fails(path: str) -> None:
        raise error

    with pytest.raises(UsageError, match=f"--plot .*x.png cannot be written: {error}"):
        save("--plot", str(tmp_path / "x.png"), fails)


@pytest.mark.parametrize("path", ["", "-", ".", os.devnull])
def test_what_is_no_file_is_refused_before_any_work(path: str) -> None:
    with pytest.raises(UsageError, match=r"--json`? must be a "):
        check_output("--json", path)


def test_an_unknown_protocol_is_refused_before_any_work() -> None:
    with pytest.raises(UsageError, match="or a URL of fsspec"):
        check_output("--json", "s4://bucket/x.json")
    check_output("--json", None)
    check_output("--json", "memory://x.json")


# -- exceptions as one line --------------------------------------------------------------------------------------------


def caught(code: str, file: str, **names: object) -> Exception:
    """Return the exception of a piece of code, as if it were in a file, without the frames of this test."""
    namespace = dict(names)
    try:
        exec(compile(code, file, "exec"), namespace)
    except Exception as error:
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    raise AssertionError(code)


def test_it_names_the_last_place_that_is_no_librarys() -> None:
    error = caught("def step():\n    import json\n    json.loads('x')\nstep()", "models.py")
    found = usage_error(error)
    assert str(found) == "JSONDecodeError in models.py:3 (`step`): Expecting value: line 1 column 1 (char 0)"


def test_an_exception_that_a_library_raised_over_it() -> None:
    def run() -> None:
        raise caught("raise KeyError('inner')", "models.py")

    code = "try:\n    run()\nexcept KeyError as error:\n    raise ValueError('outer') from error"
    error = caught(code, "/usr/lib/python3/site-packages/library.py", run=run)
    assert "KeyError in " in str(usage_error(error))
    assert str(usage_error(error)).endswith("'inner'")


def test_our_own_about_an_argument_is_its_text() -> None:
    code = "require(False, 'x', 'a number', 'y')"
    error = caught(code, "/x/site-packages/library.py", require=require)
    assert str(usage_error(error)) == "`x` must be a number, got 'y'."


def test_one_of_a_library_about_what_the_user_wrote() -> None:
    error = caught("raise RuntimeError('No\\n  optimizer')", "/x/site-packages/library.py")
    assert " ".join(str(usage_error(error)).split()) == "RuntimeError: No optimizer"


@pytest.mark.parametrize("file", ["lightning_amp.tune", "lightning_amp.cli"])
def test_one_of_ours_is_an_error_of_the_command(file: str) -> None:
    import importlib

    error = caught("raise AttributeError('oh')", str(importlib.import_module(file).__file__))
    assert usage_error(error) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`memory_limit_gib` must be given: write `memory_limit_gib=4`.",
         "`--memory-limit-gib` must be given: write `--memory-limit-gib 4`."),
        ("`margins['x/y']`: write `(\"min\", 0.1)`.", "`--margins.x/y`: write `min:0.1`."),
        ("`trainer_kwargs['strategy']` must not be 'a'.", "`--trainer.strategy` must not be 'a'."),
        ("`precisions['fp4']` must be one of", "`--precisions fp4` must be one of"),
        ("Pass `control=False` or `fp32_modules`.", "Pass `--control false` or `fp32_modules`."),
    ],
)  # fmt: skip
def test_arguments_are_written_as_options(text: str, expected: str) -> None:
    assert as_options(text) == expected
