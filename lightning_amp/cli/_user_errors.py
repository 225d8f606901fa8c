"""An exception of the user's own code, in one line, with the line of code that raised it."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path

_LIBRARIES = ("torch", "lightning", "torchmetrics", "lightning_amp", "lightning_fabric", "pytorch_lightning")


def user_error(error: BaseException) -> str:
    """Return the text of an exception, and where the user's code raised it, if it did.

    Args:
        error: What was caught.

    """
    text = f"{error}" or type(error).__name__
    place = _place(error)
    if place is None:
        return text
    file, line = place
    code = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line} `{code}` raised {type(error).__name__}: {text}"


def _place(error: BaseException) -> tuple[str, int] | None:
    """Return the innermost frame that is of no library."""
    folders = tuple(
        str(Path(str(module.__file__)).parent) for name in _LIBRARIES if _has_file(module := sys.modules.get(name))
    )
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        inside = frame.filename.startswith((*folders, "<")) or frame.filename.startswith(sys.base_prefix)
        if not inside and frame.lineno is not None and "site-packages" not in frame.filename:
            found = frame.filename, frame.lineno
    return found


def _has_file(module: object) -> bool:
    return getattr(module, "__file__", None) is not None
