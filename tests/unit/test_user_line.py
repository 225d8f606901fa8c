"""Whose code a line is."""

from __future__ import annotations

import inspect
from pathlib import Path

import lightning
import torch

import lightning_amp
from lightning_amp._user_line import Place, calling_line, innermost, is_own, is_users

HERE = __file__


def test_this_is_the_users_and_libraries_are_not() -> None:
    assert is_users(HERE)
    for file in (torch.__file__, lightning.__file__, lightning_amp.__file__, "<string>"):
        assert not is_users(file)
    assert is_own(lightning_amp.__file__)
    assert not is_own(HERE)


def test_the_line_is_shown_with_its_code() -> None:
    line = calling_line(inspect.currentframe())
    assert line is not None
    assert str(line) == f'{Path(HERE).name}:{line.line} "line = calling_line(inspect.currentframe())"'
    assert str(Place("gone.py", 3)) == "gone.py:3"


def test_of_a_traceback_the_innermost_line_counts() -> None:
    lines = [(lightning.__file__, 1), (HERE, 2), (HERE, 3), (torch.__file__, 4)]
    assert innermost(lines) == Place(HERE, 3)
    assert innermost(lines[:1]) is None
