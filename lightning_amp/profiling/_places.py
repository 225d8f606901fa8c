"""Which line of the user's code is being run."""

from __future__ import annotations

import inspect
import linecache
from pathlib import Path
from typing import NamedTuple

import lightning
import torch
import torchmetrics
from typing_extensions import final, override


def _folder(package: object) -> str:
    return str(Path(str(vars(package)["__file__"])).parent)


_OWN = str(Path(__file__).parent.parent)
_LIGHTNING = (_folder(lightning), _folder(torchmetrics), _OWN)
_LIBRARIES = (_folder(torch), *_LIGHTNING)
_TORCH = _folder(torch)
_OPTIMIZERS = _folder(torch.optim)
_STANDARD = (_folder(linecache), "<")


@final
class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int

    @override
    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        where = f"{Path(self.file).name}:{self.line}"
        return f'{where} "{code}"' if code else where


def user_place(boundary: str) -> Place | None:
    """Return the innermost line that is neither of torch, of Lightning nor of this package.

    Args:
        boundary: The file at which to stop: what called it is not what runs.

    Returns:
        The line; where only libraries are between here and the boundary, `None`.

    """
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file == boundary:
            return None
        if not file.startswith((*_LIBRARIES, *_STANDARD)):
            return Place(file, frame.f_lineno)
        frame = frame.f_back
    return None


def running_place(boundary: str) -> tuple[Place | None, bool]:
    """Return the innermost line that is not torch's, and whether it is the user's: of no library that we know.

    Args:
        boundary: As of :func:`user_place`.

    """
    frame = inspect.currentframe()
    own = str(Path(__file__).parent)
    while frame is not None and frame.f_code.co_filename != boundary:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, own, *_STANDARD)):
            return Place(file, frame.f_lineno), not file.startswith(_LIGHTNING)
        frame = frame.f_back
    return None, False


def called_by_optimizer() -> bool:
    """Return whether an optimizer of torch is reading: its counts of steps are on the host."""
    frame = inspect.currentframe()
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False
