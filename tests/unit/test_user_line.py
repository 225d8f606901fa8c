"""The owner of a line of code."""

from __future__ import annotations

import inspect
import sysconfig
from pathlib import Path

import lightning
import lightning_utilities
import pytest
import torch
import torchmetrics

import lightning_amp
from lightning_amp._user_line import Place, is_own_project, is_users, owner_of

HERE, PYTHON = __file__, sysconfig.get_path("stdlib")


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (HERE, "project"),
        (torch.nn.__file__, "torch"),
        (lightning.__file__, "Lightning"),
        (torchmetrics.__file__, "Lightning"),
        (lightning_utilities.__file__, "Lightning"),
        (lightning_amp.__file__, "ours"),
        ("<string>", "Python"),
        (f"{PYTHON}/random.py", "Python"),
        (f"{PYTHON}/site-packages/timm/models/vit.py", "installed"),  # conda, pyenv, Docker
        ("/usr/lib/python3/dist-packages/timm/models/vit.py", "installed"),
        ("/home/me/my-site-packages-tools/net.py", "project"),
    ],
)
def test_whose_code_a_file_is(file: str, owner: str) -> None:
    assert owner_of(file) == owner
    assert is_users(file) == (owner in ("project", "installed"))
    assert is_own_project(file) == (owner == "project")


def test_the_line_is_shown_with_its_code() -> None:
    line = Place(HERE, inspect.currentframe().f_lineno)
    assert str(line) == f'{Path(HERE).name}:{line.line} "line = Place(HERE, inspect.currentframe().f_lineno)"'
    assert str(Place("gone.py", 3)) == "gone.py:3"
