"""If callbacks cannot write their files, training continues bit for bit, with one warning and without half a file."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support.resuming import assert_equal, everything, plugin_for, train
from support.stores import Bucket

from lightning_amp import OverflowLocator, ScaleMonitor
from lightning_amp._files import LEFTOVER, write_atomically
from lightning_amp.reports import ScaleHistory

CALLBACKS: dict[str, Callable[[Any], L.Callback]] = {
    "ScaleMonitor": lambda folder: ScaleMonitor(dirpath=folder),
    "OverflowLocator": lambda folder: OverflowLocator(dirpath=folder),
}
SETTINGS: dict[str, Any] = {"gradient": [3, 12], "nan": [5, 6], "every_n_steps": 5}


def warnings_of(callback: Any, tmp_path: Path) -> list[str]:
    """Train with a callback that cannot write, compare the run with one without it, and return the warnings."""
    expected = everything(train(plugin_for("fp16"), 20, checkpoints=tmp_path / "a", **SETTINGS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = train(plugin_for("fp16"), 20, callbacks=[callback], checkpoints=tmp_path / "b", **SETTINGS)
    found = everything(trainer)
    assert_equal({name: found[name] for name in expected}, expected)
    return [str(w.message) for w in caught if "could not write" in str(w.message)]


@pytest.mark.parametrize("name", CALLBACKS)
def test_an_unwritable_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "out"
    callback = CALLBACKS[name](folder)
    texts = warnings_of(callback, tmp_path)
    assert len(texts) == 1
    assert re.search(
        rf"`{type(callback).__name__}` could not write to `{re.escape(str(folder))}`: .*{folder.name}", texts[0]
    )
    assert texts[0].endswith("Training is not affected.")
    assert not list(tmp_path.rglob(f"*{LEFTOVER}"))


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_bucket_that_cannot_be_reached(name: str, tmp_path: Path, bucket_folder: str) -> None:
    Bucket.failure = RuntimeError("no such host")
    callback = CALLBACKS[name](bucket_folder)
    texts = warnings_of(callback, tmp_path)
    reason = "RuntimeError: no such host. Training is not affected."
    assert texts == [f"`{type(callback).__name__}` could not write to `{bucket_folder}`: {reason}"]
    assert not Bucket.objects


class Remove(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 11:
            assert list(self.folder.iterdir())
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_folder_that_vanishes(name: str, tmp_path: Path) -> None:
    """The folder is made again, later files are whole, and the history is complete."""
    expected = everything(train(plugin_for("fp16"), 20, checkpoints=tmp_path / "a", **SETTINGS))
    callback = CALLBACKS[name](tmp_path / "out")
    callbacks = [callback, Remove(tmp_path / "out")]
    found = everything(train(plugin_for("fp16"), 20, callbacks=callbacks, checkpoints=tmp_path / "b", **SETTINGS))
    assert_equal({name: found[name] for name in expected}, expected)
    if isinstance(callback, ScaleMonitor):
        assert list(ScaleHistory.from_csv(tmp_path / "out" / "scale_history.csv")) == list(callback.history)
    else:
        assert {p.name for p in (tmp_path / "out").iterdir()} == {"overflow_step00012_rank0.json"}


def test_the_umask_is_the_users(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.csv", lambda file: file.write(""))
    finally:
        os.umask(before)
    assert (tmp_path / "a.csv").stat().st_mode & 0o777 == 0o640
