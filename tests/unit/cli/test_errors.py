"""Exceptions of the user's code as one line."""

from __future__ import annotations

import pytest

from lightning_amp._arguments import require
from lightning_amp.cli._errors import as_options, usage_error


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
