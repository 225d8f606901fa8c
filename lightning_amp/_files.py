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
    new, file = _create(target, mode)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                new.replace(target)  # as long as the lock says that this is no leftover
        if fcntl is None:
            new.replace(target)  # Windows moves no open file
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _create(target: Path, mode: str) -> tuple[Path, IO[Any]]:
    """Create a file beside `target`, locked: the system takes the lock away when the process dies."""
    while True:
        new = target.with_name(f".{target.name}.{secrets.token_hex(4)}{LEFTOVER}")
        file = new.open("xb") if mode == "binary" else new.open("x", newline="", encoding="utf-8")
        if fcntl is None:
            return new, file
        with contextlib.suppress(OSError):  # a file system without locks: there nobody cleans up either
            fcntl.flock(file, fcntl.LOCK_EX)
        if new.exists():
            return new, file
        file.close()  # another process cleaned up between the two lines and took this one for a leftover


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f".*{LEFTOVER}"):
        with contextlib.suppress(OSError):
            if fcntl is None:
                leftover.unlink()
                continue
            with leftover.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
                leftover.unlink()
