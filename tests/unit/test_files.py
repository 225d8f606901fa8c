"""Files are whole or unchanged, here and at URLs. Faults from outside: `tests/faults`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.stores import Bucket

from lightning_amp._files import LEFTOVER, child, location, open_text, write_atomically


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a folder that does not exist yet, here or at a URL; the temporary folder is `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return f"{tmp_path}/made/too" if request.param == "here" else request.getfixturevalue(request.param)


everywhere = pytest.mark.parametrize("place", ["here", "memory_folder", "bucket_folder"], indirect=True)


def content(path: str) -> bytes:
    with fsspec.open(path, "rb") as file:
        return file.read()


@everywhere
def test_text_and_bytes(place: str, tmp_path: Path) -> None:
    path = f"{place}/a.csv"
    write_atomically(path, lambda file: file.write("ä\n"))
    assert content(path) == "ä\n".encode()
    write_atomically(path, lambda file: file.write(b"\r\n"), mode="binary")
    assert content(path) == b"\r\n"
    assert [str(p) for p in tmp_path.rglob("*") if p.is_file()] == [path] * (place.startswith(str(tmp_path)))


@everywhere
@pytest.mark.parametrize("error", [ValueError("half"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(place: str, error: BaseException, tmp_path: Path) -> None:
    path = f"{place}/a.csv"
    write_atomically(path, lambda file: file.write("old"))
    before = list(tmp_path.rglob("*"))

    def fail(file: Any) -> None:
        file.write("new" * 10**6)
        file.flush()
        assert content(path) == b"old"
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert content(path) == b"old"
    assert list(tmp_path.rglob("*")) == before


def test_files_of_other_writers_stay(tmp_path: Path) -> None:
    """Without a lock that all machines see, a file of a dead process cannot be told from one of a live process."""
    theirs = tmp_path / f".b.csv.12345678{LEFTOVER}"
    theirs.write_text("half")
    write_atomically(tmp_path / "a.csv", lambda file: file.write(""))
    assert theirs.read_text() == "half"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize("place", ["memory_folder"], indirect=True)
def test_what_waits_for_its_upload_is_the_owners(place: str, tmp_path: Path) -> None:
    modes: list[int] = []
    write_atomically(f"{place}/a", lambda _: modes.extend(p.stat().st_mode & 0o777 for p in tmp_path.iterdir()))
    assert modes == [0o700]


@pytest.mark.parametrize("place", ["bucket_folder"], indirect=True)
@pytest.mark.parametrize("failure", [PermissionError("denied"), RuntimeError("no\n credentials")])
def test_an_upload_that_fails(failure: Exception, place: str, tmp_path: Path) -> None:
    """Each exception of a driver becomes an `OSError` of one line."""
    write_atomically(f"{place}/a.csv", lambda file: file.write("old"))
    Bucket.failure = failure
    with pytest.raises(OSError, match=f"^{type(failure).__name__}: {' '.join(str(failure).split())}$"):
        write_atomically(f"{place}/a.csv", lambda file: file.write("new"))
    assert Bucket.objects == {"bucket/run/a.csv": b"old"}
    assert list(tmp_path.iterdir()) == []


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((path, Path(path)) for path in ("runs", "C:\\runs", "C:/runs", "a::b", Path("/a/b"))),
        *((url, url) for url in ("memory://", "memory://runs/1/", "simplecache::test-bucket://bucket/run")),
        *((f"{protocol}://{Path.cwd()}", Path.cwd()) for protocol in ("file", "local")),
    ],
)
def test_a_path_or_a_url(given: Any, expected: Any) -> None:
    assert location(given) == expected


def test_a_child() -> None:
    assert child(Path("runs"), "a.csv") == Path("runs/a.csv")
    assert child("memory://", "a.csv") == "memory://a.csv"
    assert child("memory://runs", "a.csv") == child("memory://runs/", "a.csv") == "memory://runs/a.csv"


@everywhere
def test_reading(place: str) -> None:
    """Editors on Windows write a byte order mark in front of a text."""
    value = "\ufeffä\r\nb\n".encode()
    write_atomically(f"{place}/a", lambda file: file.write(value), mode="binary")
    with open_text(f"{place}/a") as file:
        assert file.read() == "ä\r\nb\n"
    with pytest.raises(FileNotFoundError):
        open_text(f"{place}/b")
