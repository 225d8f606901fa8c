"""Telling URLs from paths, reading both, and failed uploads. For S3 see `tests/faults`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.stores import Bucket

from lightning_amp._urls import child, is_url, location, open_to_read, upload


class Universal:
    """As `UPath` of universal-pathlib, which is no `os.PathLike` for a remote URL."""

    def __str__(self) -> str:
        return "memory://runs/1"


@pytest.mark.parametrize(
    "path",
    [
        "runs",
        "C:\\runs",
        "C:/runs",
        "C://runs",
        "runs/s3://x",
        "./x::s3://b",
        "a::b",
        "runs::2",
        "name:/x",
        Path("/s3://x"),
    ],
)
def test_a_path(path: Any) -> None:
    assert location(path) == Path(path)
    assert not is_url(path)


@pytest.mark.parametrize("path", ["", "a\0b", "memory://a/\0"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ValueError, match=r"`dirpath` must be a path or a URL, and no null character in it, got '"):
        location(path, "dirpath")
    with pytest.raises(ValueError, match="`path` must be a path or a URL"):
        open_to_read(path, "text")


def test_a_mark_in_front_of_a_text_is_left_out(tmp_path: Path) -> None:
    """Editors and spreadsheets on Windows write a byte order mark."""
    (tmp_path / "a.csv").write_text("\ufeffindex\r\n", encoding="utf-8")
    MemoryFileSystem().pipe_file("/a.csv", (tmp_path / "a.csv").read_bytes())
    for path in (tmp_path / "a.csv", "memory://a.csv"):
        with open_to_read(path, "text") as file:
            assert file.read() == "index\r\n"
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize(
    "url", ["memory://", "memory://runs/1/", "test-bucket://bucket/run", "simplecache::test-bucket://bucket/run"]
)
def test_a_url_is_left_alone(url: str) -> None:
    assert location(url) == url
    assert is_url(url)


def test_an_object_whose_text_is_a_url() -> None:
    assert location(Universal()) == "memory://runs/1"  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_this_machine_is_a_path(protocol: str, tmp_path: Path) -> None:
    assert location(f"{protocol}://{tmp_path}") == tmp_path


@pytest.mark.parametrize("lost", ["memory:/runs/1", Path("memory://runs/1"), Path("test-bucket://bucket/run")])
def test_a_lost_slash_is_refused(lost: Any) -> None:
    """Such a folder would be made here silently."""
    with pytest.raises(ValueError, match=r"`dirpath` must be .* got .*:/.* `pathlib.Path` keeps one slash of two"):
        location(lost, "dirpath")


@pytest.mark.parametrize(
    ("url", "advice"),
    [("S3://bucket", "Did you mean `s3://`?"), ("memry://runs", "Did you mean `memory://`?"), ("no-such://x", "lists")],
)
def test_an_unknown_protocol_is_refused(url: str, advice: str) -> None:
    with pytest.raises(
        ValueError, match=r"`dirpath` must be a path, or a URL whose protocol fsspec supports, got "
    ) as e:
        location(url, "dirpath")
    assert repr(url) in str(e.value)
    assert advice in str(e.value)


@pytest.mark.parametrize("url", ["gs://bucket/run", "simplecache::gs://bucket/run"])
def test_a_missing_driver_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=rf"`dirpath` is '{url}', .* Run `pip install gcsfs`\.$"):
        location(url, "dirpath")


def test_a_missing_driver_of_fsspec_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(ImportError, match=r'cannot be imported: SFTPFileSystem requires "paramiko" to be installed\.$'):
        location("sftp://host/run")


def test_a_child() -> None:
    assert child(Path("runs"), "a.csv") == Path("runs/a.csv")
    assert child("memory://", "a.csv") == "memory://a.csv"
    assert child("memory://runs", "a.csv") == child("memory://runs/", "a.csv") == "memory://runs/a.csv"


def test_both_are_read(tmp_path: Path, folder_url: str) -> None:
    value = "ä\r\nb\n".encode()
    (tmp_path / "a").write_bytes(value)
    upload(tmp_path / "a", f"{folder_url}/a")
    for path in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a", f"{folder_url}/a"):
        with open_to_read(path, "binary") as file:
            assert file.read() == value
            assert file.seek(0) == 0
        with open_to_read(path, "text") as file:
            assert file.read() == "ä\r\nb\n"


@pytest.mark.parametrize("mode", ["text", "binary"])
def test_what_is_not_there(mode: Any, tmp_path: Path, folder_url: str) -> None:
    for path in (tmp_path / "a", f"{folder_url}/a"):
        with pytest.raises(FileNotFoundError):
            open_to_read(path, mode)


def test_an_upload_takes_the_place_of_the_old(tmp_path: Path, folder_url: str) -> None:
    for text in ("old", "new"):
        (tmp_path / "a").write_text(text)
        upload(tmp_path / "a", f"{folder_url}/deep/a.csv")
        with fsspec.open(f"{folder_url}/deep/a.csv", "r") as file:
            assert file.read() == text
    assert len([*Bucket.objects, *MemoryFileSystem.store]) == 1


class DriversOwnError(Exception):
    pass


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (PermissionError("Access Denied"), "^Access Denied$"),
        (DriversOwnError("no\n credentials"), "^DriversOwnError: no credentials$"),
    ],
)
def test_an_upload_that_fails(failure: Exception, text: str, tmp_path: Path, bucket_folder: str) -> None:
    """Each exception of a driver becomes an `OSError` of one line."""
    (tmp_path / "a").write_text("new")
    Bucket.objects["bucket/run/a"] = b"old"
    Bucket.failure = failure
    with pytest.raises(OSError, match=text):
        upload(tmp_path / "a", f"{bucket_folder}/a")
    assert Bucket.objects == {"bucket/run/a": b"old"}


@pytest.mark.parametrize("failure", [DriversOwnError(), KeyboardInterrupt()])
def test_an_upload_that_fails_where_files_are_filled_in_place(
    failure: BaseException, tmp_path: Path, memory_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old file stays, and half of the new one is removed."""

    def half(self: MemoryFileSystem, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.pipe_file(rpath, b"ne")
        raise failure

    (tmp_path / "a").write_text("old")
    upload(tmp_path / "a", f"{memory_folder}/a")
    monkeypatch.setattr(MemoryFileSystem, "put_file", half)
    with pytest.raises((OSError, KeyboardInterrupt)):
        upload(tmp_path / "a", f"{memory_folder}/a")
    assert {key: file.getvalue() for key, file in MemoryFileSystem.store.items()} == {"/runs/1/a": b"old"}


def test_a_folder_below_a_file(tmp_path: Path, memory_folder: str) -> None:
    (tmp_path / "a").write_text("")
    upload(tmp_path / "a", memory_folder)
    with pytest.raises(OSError, match="runs/1"):
        upload(tmp_path / "a", f"{memory_folder}/a.csv")
