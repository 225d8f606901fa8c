"""Writing files that are never torn."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that another process has open
    fcntl = None

LEFTOVER = ".lightning-amp.tmp"
"""How files end that are being written. One that is still there after its process died is removed at the next write."""


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[Any], object], *, mode: Literal["text", "binary"] = "text"
) -> None:
    """Let `write` fill a file that then takes the place of `path` in one move; folders are made.

    A process that is killed on the way leaves the old file, and a hidden one beside it that the next write into the
    folder removes.

    Args:
        path: The file.
        write: Gets the open file.
        mode: Text in UTF-8 with line ends as written, or binary.

    Raises:
        OSError: If the folder cannot be written; nothing is left behind.

    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}{LEFTOVER}")
    try:
        with new.open("xb") if mode == "binary" else new.open("x", newline="", encoding="utf-8") as file:
            _lock(file)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _lock(file: IO[Any]) -> None:
    """Show that the file's process is alive: the system takes the lock away when it dies."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f".*{LEFTOVER}"):
        with contextlib.suppress(OSError):
            if fcntl is None:
                leftover.unlink()
                continue
            with leftover.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
                leftover.unlink()
