"""Write files that are never half written, and read them: on this machine or at a URL of fsspec."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

from fsspec import get_filesystem_class
from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_amp._arguments import require

LEFTOVER = ".lightning-amp.tmp"
"""Suffix of unfinished files. One stays if the process that writes it is killed; no later write removes it, because it
may belong to a process that still writes it."""

_LOST_SLASH = re.compile(r"[\w+.-]{2,}:[/\\](?!/)")
"""Matches `s3:/bucket`, a folder on this machine that `pathlib.Path` makes of a URL."""


def location(path: str | os.PathLike[str], name: str = "path") -> Path | str:
    """Return a path on this machine as a `Path`, and a URL as a string. `file://` is a path on this machine.

    An object whose `str` is a URL (`UPath`) counts as one.

    Raises:
        ValueError: If the path is empty, if the URL lacks a slash, or if fsspec does not know the protocol. The message
            names the argument: `name`.
        ImportError: If the driver of the protocol is not installed.

    """
    text = str(path)
    rule = "a path, or a URL as a string (`pathlib.Path` drops a slash)"
    require(bool(text) and not _LOST_SLASH.match(text), name, rule, path)
    if split_protocol(text)[0] is None:
        return Path(path)
    try:
        stores = [get_filesystem_class(protocol) for protocol in text.partition("://")[0].split("::")]
    except (ValueError, ImportError) as error:
        raise type(error)(f"`{name}` must be a path or a URL of fsspec, got {text!r}. {error}") from error
    return Path(url_to_fs(text)[1]) if issubclass(stores[0], LocalFileSystem) else text


def child(folder: Path | str, name: str) -> Path | str:
    """Return the location of a file in a folder."""
    return folder / name if isinstance(folder, Path) else f"{folder}{'' if folder.endswith('/') else '/'}{name}"


def open_text(path: str | os.PathLike[str], name: str = "path") -> IO[str]:
    """Open a file or a URL to read its text: UTF-8, with or without a byte order mark, with its own line ends."""
    place = location(path, name)
    how: dict[str, Any] = {"mode": "r", "newline": "", "encoding": "utf-8-sig"}
    if isinstance(place, Path):
        return place.open(**how)
    store, key = url_to_fs(place)
    return store.open(key, **how)


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[IO[Any]], object], *, mode: Literal["text", "binary"] = "text"
) -> None:
    """Let `write` fill a new file, and then move it to `path`, or upload it if that is a URL. Missing folders are made.

    A process that is killed before the move leaves the old file. A bucket shows no part of an upload either; a server,
    such as one of SFTP, does.

    Args:
        path: The file, or a URL of fsspec.
        write: Is called with the open file.
        mode: Text in UTF-8 with line ends as written, or binary.

    Raises:
        OSError: If the file cannot be written. No partial file is left behind.
        ValueError: See :func:`location`; so for `ImportError`.

    """
    target = location(path)
    how: dict[str, Any] = {"mode": "xb"} if mode == "binary" else {"mode": "x", "newline": "", "encoding": "utf-8"}
    if isinstance(target, str):
        with tempfile.TemporaryDirectory() as folder:  # the owner's only
            new = Path(folder) / "new"
            with new.open(**how) as file:
                write(file)
            try:
                store, key = url_to_fs(target)
                store.put_file(str(new), key)  # `store.open` would keep half a file if its writer raises
            except Exception as error:  # drivers raise their own exceptions: no credentials, no connection
                raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}{LEFTOVER}")
    try:
        with new.open(**how) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write plain data, without NaN and infinities, as JSON. See :func:`write_atomically`."""
    text = json.dumps(data, indent=1, allow_nan=False)
    write_atomically(path, lambda file: file.write(f"{text}\n"))
