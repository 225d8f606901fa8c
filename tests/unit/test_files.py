"""Files are whole or as before, with locks and (as on Windows) without. Faults from outside: `tests/faults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
