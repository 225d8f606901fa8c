"""Files are whole or unchanged, with locks and (as on Windows) without. Faults from outside: `tests/faults`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.stores import Bucket

from lightning_amp import _files
from lightning_amp._files import LEFTOVER, write_atomically


@pytest.fixture(params=["locks", "no locks"], autouse=True)
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no locks":
        monkeypatch.setattr(_files, "fcntl", None)


def test_text_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "made" / "too" / "a.csv"
    write_atomically(path, lambda file: file.write("ä\n"))
    assert path.read_bytes() == "ä\n".encode()
    write_atomically(str(path), lambda file: file.write(b"\r\n"), mode="binary")
    assert path.read_bytes() == b"\r\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("half"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.csv"
    write_atomically(path, lambda file: file.write("old"))

    def fail(file: Any) -> None:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.csv": "old"}


def test_what_a_dead_process_left_goes(tmp_path: Path) -> None:
    (tmp_path / f".b.csv.12345678{LEFTOVER}").write_text("half")
    write_atomically(tmp_path / "a.csv", lambda file: file.write(""))
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]


# -- URLs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder, in which a file waits for its upload."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def content(url: str) -> bytes:
    with fsspec.open(url, "rb") as file:
        return file.read()


def test_text_and_bytes_to_a_url(folder_url: str, staging: Path) -> None:
    url = f"{folder_url}/made/a.csv"
    write_atomically(url, lambda file: file.write("ä\n"))
    assert content(url) == "ä\n".encode()
    write_atomically(url, lambda file: file.write(b"\r\n"), mode="binary")
    assert content(url) == b"\r\n"
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError("half"), KeyboardInterrupt()])
def test_a_failure_leaves_what_is_at_the_url(folder_url: str, staging: Path, error: BaseException) -> None:
    """Files of fsspec keep their contents when an exception closes them."""
    url = f"{folder_url}/a.csv"
    write_atomically(url, lambda file: file.write("old"))

    def fail(file: Any) -> None:
        file.write("new" * 10**6)
        file.flush()
        assert content(url) == b"old"
        raise error

    with pytest.raises(type(error)):
        write_atomically(url, fail)
    assert content(url) == b"old"
    assert list(staging.iterdir()) == []


def test_an_upload_that_fails_leaves_nothing_here(bucket_folder: str, staging: Path) -> None:
    Bucket.failure = ConnectionError("nobody there")
    with pytest.raises(OSError, match="nobody there"):
        write_atomically(f"{bucket_folder}/a.csv", lambda file: file.write("new"))
    assert list(staging.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_what_waits_for_its_upload_is_the_owners(folder_url: str, staging: Path) -> None:
    modes: list[int] = []
    write_atomically(f"{folder_url}/a.csv", lambda file: modes.append(os.fstat(file.fileno()).st_mode & 0o777))
    assert modes == [0o600]


def test_what_a_dead_process_left_of_an_upload_goes(folder_url: str, staging: Path) -> None:
    (staging / f".b.pt.12345678{LEFTOVER}").write_text("half")
    write_atomically(f"{folder_url}/a.csv", lambda file: file.write(""))
    assert list(staging.iterdir()) == []
