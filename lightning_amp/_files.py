"""Write files that are never half written."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, Literal

from lightning_amp._urls import location, upload

try:
    import fcntl
except ImportError:  # Windows cannot remove a file that a process has open
    fcntl = None

LEFTOVER = ".lightning-amp.tmp"
"""Suffix of unfinished files.

If the process that was writing one has died, the next write into the folder removes the file.
"""


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[Any], object], *, mode: Literal["text", "binary"] = "text"
) -> None:
    """Let `write` fill a new file, and then move it to `path`. Missing folders are made.

    A process that is killed before the move leaves the old file, and a hidden new file that the next write into the
    folder removes. For a URL, the new file is in the temporary folder of this machine and is uploaded when it is whole.

    Args:
        path: The file, or a URL of fsspec.
        write: Is called with the open file.
        mode: Text in UTF-8 with line ends as written, or binary.

    Raises:
        OSError: If the folder cannot be written. No partial file is left behind.
        ValueError: If fsspec does not support the protocol of the URL.
        ImportError: If the driver for it is not installed.

    """
    target = location(path)
    if isinstance(target, str):
        folder, name = Path(tempfile.gettempdir()), target.rpartition("/")[2]
        with _new_file(folder, name, mode, permissions=0o600) as (new, file):  # other users can read that folder
            write(file)
            file.flush()
            upload(new, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _new_file(target.parent, target.name, mode) as (new, file):
        write(file)
        file.flush()
        os.fsync(file.fileno())
        if fcntl is None:
            file.close()  # Windows cannot move an open file
        new.replace(target)  # while the lock is held, so that no process takes it for a leftover


@contextlib.contextmanager
def _new_file(
    folder: Path, name: str, mode: str, permissions: int = 0o666
) -> Generator[tuple[Path, IO[Any]], None, None]:
    """Make a hidden file, and remove it at the end unless it was moved. The umask restricts `permissions`."""
    _remove_leftovers(folder)
    path, file = _create(folder, name, mode, permissions)
    try:
        with file:
            yield path, file
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _create(folder: Path, name: str, mode: str, permissions: int) -> tuple[Path, IO[Any]]:
    """Create a locked file. The system releases the lock when the process dies."""
    how: dict[str, Any] = {"mode": "xb"} if mode == "binary" else {"mode": "x", "newline": "", "encoding": "utf-8"}

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags, permissions)

    while True:
        new = folder / f".{name}.{secrets.token_hex(4)}{LEFTOVER}"
        file = open(new, **how, opener=opener)  # noqa: SIM115 - `_new_file` closes it
        if fcntl is None:
            return new, file
        with contextlib.suppress(OSError):  # on a file system without locks, leftovers are not cleaned up
            fcntl.flock(file, fcntl.LOCK_EX)
        if new.exists():
            return new, file
        file.close()  # another process removed it as a leftover before it was locked


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f".*{LEFTOVER}"):
        with contextlib.suppress(OSError):
            if fcntl is None:
                leftover.unlink()
                continue
            with leftover.open("r+b") as file:
                # raises OSError while the process that writes the file lives
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
