"""Write to a bucket through the real S3 protocol, on a local server: `pip install s3fs 'moto[server]'`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support import Poison, Toy, batches, fit
from zoo.overflows import BadRow, fp16, with_bad

from lightning_amp import OverflowLocator, ScaleMonitor
from lightning_amp._files import write_atomically
from lightning_amp.reports import ScaleHistory

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

FOLDER = "s3://bucket/run"
LARGE_MIB = 220  # large enough for several parts

KILLED = f"""
import os
from lightning_amp._files import write_atomically

def write(file):
    for _ in range({LARGE_MIB}):
        file.write(os.urandom(2**20))
    print("uploads", flush=True)

write_atomically("{FOLDER}/a.pt", write, mode="binary")
"""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "TMPDIR": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    store_class = fsspec.get_filesystem_class("s3")
    store_class.clear_instance_cache()
    store = fsspec.filesystem("s3")
    store.mkdir("bucket")
    yield store
    store.rm("bucket", recursive=True)  # otherwise the next server in this process would reuse it
    store_class.clear_instance_cache()
    server.stop()


def test_reports_and_the_history(s3: Any) -> None:
    monitor, locator = ScaleMonitor(dirpath=FOLDER), OverflowLocator(dirpath=FOLDER)
    fit(BadRow, fp16(), with_bad(5), callbacks=[monitor, locator])
    assert list(ScaleHistory.from_csv(f"{FOLDER}/scale_history.csv")) == list(monitor.history)
    names = ["overflow_step00005_rank0.json", "scale_history.csv"]
    assert s3.find(FOLDER) == [f"bucket/run/{name}" for name in names]


def test_a_write_that_fails(s3: Any) -> None:
    write_atomically(f"{FOLDER}/a.csv", lambda file: file.write("old"))

    def fail(file: Any) -> None:
        file.write("new" * 10**7)
        raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        write_atomically(f"{FOLDER}/a.csv", fail)
    assert s3.cat(f"{FOLDER}/a.csv") == b"old"


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_an_upload_that_is_killed(s3: Any) -> None:
    """The bucket keeps the old object."""
    write_atomically(f"{FOLDER}/a.pt", lambda file: file.write("old"))
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "uploads\n"
        while not s3.list_multipart_uploads("bucket"):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    s3.invalidate_cache()
    assert s3.cat(f"{FOLDER}/a.pt") == b"old"


def test_a_bucket_that_is_not_there(s3: Any) -> None:
    with pytest.warns(UserWarning, match="could not write to `s3://no-such-bucket/run`: .*bucket") as caught:
        fit(Toy, fp16(), batches(4), callbacks=[Poison(gradient=[1]), ScaleMonitor(dirpath="s3://no-such-bucket/run")])
    assert sum("could not write" in str(w.message) for w in caught) == 1
    assert s3.ls("", refresh=True) == ["bucket"]  # the bucket does not exist
