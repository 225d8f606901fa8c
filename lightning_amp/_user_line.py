"""Find out who owns the code in a file, and write a line of it."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from typing_extensions import final, override

Owner = Literal["ours", "torch", "Lightning", "Python", "installed", "project"]

_OWN = str(Path(__file__).parent) + os.sep
_PYTHON = ("<", sysconfig.get_paths()["stdlib"] + os.sep, str(Path(linecache.__file__).parent) + os.sep)
_INSTALLED = {"site-packages", "dist-packages"}


@final
class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int

    @override
    def __str__(self) -> str:
        """Write `losses.py:75 "log_z = torch.log(z)"`."""
        return f'{self.short} "{self.code}"' if self.code else self.short

    @property
    def short(self) -> str:
        """Write `losses.py:75`."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def code(self) -> str:
        """Return the text of the line; empty where there is no file."""
        return linecache.getline(self.file, self.line).strip()


@functools.cache
def _folders() -> dict[Owner, tuple[str, ...]]:
    frameworks = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
    return {"ours": (_OWN,), "torch": _of("torch"), "Lightning": tuple(f for name in frameworks for f in _of(name))}


def _of(package: str) -> tuple[str, ...]:
    spec = find_spec(package)
    return (str(Path(spec.origin).parent) + os.sep,) if spec is not None and spec.origin else ()


@functools.cache
def owner_of(file: str) -> Owner:
    """Return the owner of the code in a file.

    Conda, pyenv and Docker keep `site-packages` inside Python's own folder; packages there are not Python's.
    """
    for owner, folders in _folders().items():
        if file.startswith(folders):
            return owner
    if not _INSTALLED.isdisjoint(file.replace(os.sep, "/").split("/")):
        return "installed"
    return "Python" if file.startswith(_PYTHON) else "project"


def is_users(file: str) -> bool:
    """Return whether a file belongs to the user, or to an installed package other than torch and Lightning."""
    return owner_of(file) in ("project", "installed")


def is_own_project(file: str) -> bool:
    """Return whether a file is the user's own, so that they can edit it."""
    return owner_of(file) == "project"
