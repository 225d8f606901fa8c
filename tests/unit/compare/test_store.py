"""The folder of a comparison; `test_compare.py` tests how it is used."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from lightning_amp._files import write_atomically
from lightning_amp.compare import _run_file
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._store import Store, file_name

SETTINGS = {"make_module": "models.Net", "trainer_kwargs": {"max_epochs": "1"}}
ARMS = {"fp32": "AmpPrecision('fp32')", "bf16": "AmpPrecision('bf16')"}
LABELS = [
    "fp32",
    "fp16, head in fp32",
    "fp16 head in fp32",
    "a/b",
    "a b",
    "..",
    "ü",
    "x" * 300,
    "con:",
    "<b>",
    "?",
    "*",
]


def test_every_label_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = [file_name(label, 0) for label in LABELS]
    assert len({name.lower() for name in names}) == len(LABELS)
    assert file_name("fp32", 3) == "fp32-seed3"
    store = Store(tmp_path, SETTINGS, dict.fromkeys(LABELS, "text"))
    for label in LABELS:
        store.save(ArmRun(label, 0))
    assert [store.load(label, 0).label for label in LABELS] == LABELS
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*.json"))


def test_only_what_finished_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder", SETTINGS, ARMS)
    store.save(ArmRun("fp32", 0, error="no"))
    assert store.load("fp32", 0) is None
    assert store.load("fp32", 1) is None
    store.save(ArmRun("fp32", 0))
    assert store.load("fp32", 0) == ArmRun("fp32", 0)


def test_a_file_that_was_copied_from_another_comparison(tmp_path: Path) -> None:
    Store(tmp_path / "other", {**SETTINGS, "make_module": "models.Other"}, ARMS).save(ArmRun("fp32", 0))
    store = Store(tmp_path / "own", SETTINGS, ARMS)
    (tmp_path / "own" / "fp32-seed0.json").write_bytes((tmp_path / "other" / "fp32-seed0.json").read_bytes())
    with pytest.raises(ValueError, match=r"fp32-seed0.json` is a run of another comparison"):
        store.load("fp32", 0)


def test_another_comparison_is_refused_by_name(tmp_path: Path) -> None:
    Store(tmp_path / "mine", SETTINGS, ARMS)
    changed = {**SETTINGS, "make_module": "models.Other"}
    with pytest.raises(ValueError, match=r"mine' has another .*its `make_module`: models.Net, not models.Other"):
        Store(tmp_path / "mine", changed, ARMS)
    assert json.loads((tmp_path / "mine" / "comparison.json").read_text())["comparison"] == SETTINGS


def test_work_folders(tmp_path: Path, memory_folder: str) -> None:
    assert Store(tmp_path, SETTINGS, ARMS).work_folder("fp32", 1) == tmp_path / "fp32-seed1"
    assert Store(memory_folder, SETTINGS, ARMS).work_folder("fp32", 1) is None


def test_a_run_that_failed_is_returned_on_request(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS, ARMS)
    store.save(ArmRun("fp32", 0, error="no"))
    assert store.load("fp32", 0) is None
    found = store.load("fp32", 0, failed=True)
    assert found is not None
    assert found.error == "no"


def test_another_precision_may_be_added(tmp_path: Path) -> None:
    """The folder then keeps the arms of both calls, and the earlier runs stay valid."""
    Store(tmp_path, SETTINGS, ARMS).save(ArmRun("fp32", 0))
    more = Store(tmp_path, SETTINGS, {"fp32": ARMS["fp32"], "fp16": "AmpPrecision('fp16')"})
    assert more.load("fp32", 0) == ArmRun("fp32", 0)
    assert more.load("fp16", 0) is None
    assert set(json.loads((tmp_path / "comparison.json").read_text())["arms"]) == {"fp32", "bf16", "fp16"}


def test_more_seeds_are_other_files(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS, ARMS)
    store.save(ArmRun("fp32", 0))
    store.save(ArmRun("fp32", 1))
    assert [store.load("fp32", seed) for seed in range(3)] == [ArmRun("fp32", 0), ArmRun("fp32", 1), None]


def test_a_changed_arm_of_the_same_label_is_refused_by_name(tmp_path: Path) -> None:
    """Also by a call that comes after one with other arms."""
    Store(tmp_path, SETTINGS, ARMS)
    Store(tmp_path, SETTINGS, {"fp32": ARMS["fp32"]})
    changed = {**ARMS, "bf16": "AmpPrecision('bf16', fp32_modules=['head'])"}
    with pytest.raises(ValueError, match=r"its `precisions\['bf16'\]`: AmpPrecision\('bf16'\), not .*'head'"):
        Store(tmp_path, SETTINGS, changed)


def test_measurements_beside_a_run_are_kept_apart(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS, ARMS)
    store.save(ArmRun("fp32", 0, num_steps=5), "speed")
    assert store.load("fp32", 0) is None
    assert store.load("fp32", 0, "speed") == ArmRun("fp32", 0, num_steps=5)


def test_two_writers_of_one_run_never_leave_half_a_file(tmp_path: Path) -> None:
    """A reader sees, at any time, the whole run of one of them."""
    store = Store(tmp_path, SETTINGS, ARMS)
    runs = [ArmRun("fp32", 0, num_steps=number, log=str(number) * 200_000) for number in (1, 2)]
    store.save(runs[0])
    file = store.file("fp32", 0)

    def write(run: ArmRun) -> None:
        for _ in range(20):
            file.write(run)

    writers = [threading.Thread(target=write, args=[run]) for run in runs]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert store.load("fp32", 0) in runs
    assert store.load("fp32", 0) in runs
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".json"] == []


def test_a_folder_that_becomes_full_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, SETTINGS, ARMS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_run_file, "write_atomically", full)
    with pytest.warns(UserWarning, match="could not write to .*No space left on device"):
        store.save(ArmRun("fp32", 0))
    store.save(ArmRun("bf16", 0))  # a second warning would be an error here
    monkeypatch.setattr(_run_file, "write_atomically", write_atomically)
    store.save(ArmRun("fp32", 0))
    assert store.load("fp32", 0) == ArmRun("fp32", 0)
