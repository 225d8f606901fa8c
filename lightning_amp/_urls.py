"""Read and write URLs of fsspec: files in a bucket, on a server, or in memory."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import secrets
from pathlib import Path
from typing import IO, Any, Literal

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations, registry

from lightning_amp._arguments import require

_PROTOCOL = re.compile(r"(?:^|::)([A-Za-z][\w+.-]+)(?=://|::)")
"""`s3` in `s3://bucket`, `simplecache` and `s3` in `simplecache::s3://bucket`. A single letter is a Windows drive."""

_ONE_SLASH = re.compile(r"([A-Za-z][\w+.-]+):[/\\](?!/)")

_HERE = {"file", "local"}

_FILLED_IN_PLACE = {"memory", "sftp", "ssh", "hdfs"}
"""Stores that show a file during its upload, and whose `mv` replaces another file."""


def is_url(path: object) -> bool:
    """Return whether a path is a URL, or an object whose `str` is a URL."""
    return bool(_protocols(str(path)))


def location(path: str | os.PathLike[str], name: str = "path") -> Path | str:
    """Return a path on this machine as a `Path`, and a URL as a string.

    Args:
        path: A path, a URL, or an object whose `str` is a URL (`UPath`). `file://` is a path on this machine.
        name: The name of the argument, for the error.

    Raises:
        ValueError: If the path is empty or has a null character, if fsspec does not support the protocol, or if the URL
            lacks a slash.
        ImportError: If the driver of the protocol is not installed.

    """
    text = str(path)
    advice = "" if text else "Write `'.'` for the current folder."
    require(bool(text) and "\0" not in text, name, "a path or a URL, and no null character in it", path, advice)
    protocols = _protocols(text)
    if not protocols:
        _require_both_slashes(name, path)
        return Path(path)
    for protocol in protocols:
        _require_driver(protocol, name, text)
    return Path(url_to_fs(text)[1]) if protocols[0] in _HERE else text


def child(folder: Path | str, name: str) -> Path | str:
    """Return the location of a file in a folder."""
    return folder / name if isinstance(folder, Path) else f"{folder}{'' if folder.endswith('/') else '/'}{name}"


def open_to_read(path: str | os.PathLike[str], mode: Literal["text", "binary"], name: str = "path") -> IO[Any]:
    """Open a file or a URL: text in UTF-8, with or without a byte order mark, with its own line ends; or binary."""
    place = location(path, name)
    how: dict[str, Any] = {"mode": "rb"} if mode == "binary" else {"mode": "r", "newline": "", "encoding": "utf-8-sig"}
    if isinstance(place, Path):
        return place.open(**how)
    store, key = url_to_fs(place)
    return store.open(key, **how)


def upload(file: Path, url: str) -> None:
    """Upload a file of this machine to `url`, and replace the file there. Missing folders are made.

    A bucket shows no part of an upload that was interrupted. A store that shows files during the upload gets the file
    under another name, and then moves it; a process that is killed before the move leaves it there.

    Raises:
        OSError: If the URL cannot be written. The old file stays unchanged.

    """
    try:
        store, key = url_to_fs(url)
        if _protocols(url)[-1] not in _FILLED_IN_PLACE:
            store.put_file(str(file), key)  # `store.open` would keep half a file if its writer raises
            return
        new = f"{key}.{secrets.token_hex(4)}.part"
        try:
            store.put_file(str(file), new)
            store.mv(new, key)
        except BaseException:
            with contextlib.suppress(Exception):
                store.rm(new)
            raise
    except OSError:
        raise
    except Exception as error:  # drivers raise their own exceptions: no credentials, no connection
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _protocols(text: str) -> list[str]:
    """Return the protocols of a URL, with the store's own last; a path has none."""
    return _PROTOCOL.findall(text) if "://" in text and _PROTOCOL.match(text) else []


def _is_known(protocol: str) -> bool:
    return protocol in known_implementations or protocol in registry


def _require_driver(protocol: str, name: str, url: str) -> None:
    similar = difflib.get_close_matches(protocol.lower(), known_implementations, n=1, cutoff=0.5)
    advice = f"Did you mean `{similar[0]}://`?" if similar else "`fsspec.available_protocols()` lists them."
    require(_is_known(protocol), name, "a path, or a URL whose protocol fsspec supports", url, advice)
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        advice = "" if package == "fsspec" else f" Run `pip install {package}`."
        raise ImportError(f"`{name}` is {url!r}, whose driver cannot be imported: {error}.{advice}") from error


def _require_both_slashes(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse `pathlib.Path("s3://bucket")`: it becomes `s3:/bucket`, a folder on this machine."""
    lost = _ONE_SLASH.match(str(path))
    advice = "`pathlib.Path` keeps one slash of two: pass the URL as a string."
    require(lost is None or not _is_known(lost[1]), name, "a path, or a URL with both slashes", path, advice)
