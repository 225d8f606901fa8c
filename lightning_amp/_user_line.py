"""Which line of the user's code a frame, or a traceback, is in."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from typing_extensions import final, override

_OWN = str(Path(__file__).parent) + os.sep


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
def _libraries() -> tuple[str, ...]:
    """Return the folders of what calls user code, and of what user code calls: torch, Lightning, Python, this."""
    specs = [
        find_spec(name) for name in ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
    ]
    folders = [str(Path(spec.origin).parent) + os.sep for spec in specs if spec is not None and spec.origin]
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    return (*folders, _OWN, os.path.join(standard, "contextlib.py"), os.path.join(standard, "functools.py"), "<")


def is_users(file: str) -> bool:
    """Return whether a file is none of torch, Lightning and this package."""
    return not file.startswith(_libraries())


def is_own(file: str) -> bool:
    """Return whether a file is of this package."""
    return file.startswith(_OWN)


def calling_line(frame: FrameType | None) -> Place | None:
    """Return the innermost line of the user's code from a frame outwards; `None` where this package comes first."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_own(file):
            return None
        if is_users(file):
            return Place(file, frame.f_lineno)
        frame = frame.f_back
    return None


def innermost(lines: Iterable[tuple[str, int]]) -> Place | None:
    """Return the last line of the user's code of a traceback, given as files and lines, outermost first."""
    found = [Place(file, line) for file, line in lines if is_users(file)]
    return found[-1] if found else None
