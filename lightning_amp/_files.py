"""Writing files that are never torn."""

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
except ImportError:  # Windows, where nobody can remove a file that another process has open
    fcntl = None

LEFTOVER = ".lightning-amp.tmp"
"""How files end that are being written. One that is still there after its process died is removed at the next write."""


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[Any], object], *, mode: Literal["text", "binary"] = "text"
) -> None:
    """Let `write` fill a file that then takes the place of `path` in one move; folders are made.

    A process that is killed on the way leaves the old file, and a hidden one that the next write into the folder
    removes. For a URL that one is in the temporary folder of this machine, and is uploaded when it is whole.

    Args:
        path: The file, or a URL of fsspec.
        write: Gets the open file.
        mode: Text in UTF-8 with line ends as written, or binary.

    Raises:
        OSError: If the folder cannot be written; nothing is left behind.
        ValueError: If fsspec does not know the protocol of the URL.
        ImportError: If the driver for it is not installed.

    """
    target = location(path)
    if isinstance(target, str):
        folder, name = Path(tempfile.gettempdir()), target.rpartition("/")[2]
        with _new_file(folder, name, mode, permissions=0o600) as (new, file):  # others, too, can look in there
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
            file.close()  # Windows moves no open file
        new.replace(target)  # as long as the lock says that this is no leftover


@contextlib.contextmanager
def _new_file(
    folder: Path, name: str, mode: str, permissions: int = 0o666
) -> Generator[tuple[Path, IO[Any]], None, None]:
    """Make a hidden file that is gone afterwards, unless it was moved; `permissions` are less those of the umask."""
    _remove_leftovers(folder)
    path, file = _create(folder, name, mode, permissions)
    try:
        with file:
            yield path, file
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _create(folder: Path, name: str, mode: str, permissions: int) -> tuple[Path, IO[Any]]:
    """Create a file, locked: the system takes the lock away when the process dies."""
    how: dict[str, Any] = {"mode": "xb"} if mode == "binary" else {"mode": "x", "newline": "", "encoding": "utf-8"}

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags, permissions)

    while True:
        new = folder / f".{name}.{secrets.token_hex(4)}{LEFTOVER}"
        file = open(new, **how, opener=opener)  # noqa: SIM115 - `_new_file` closes it
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
