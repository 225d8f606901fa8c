"""The folder of a comparison; `test_compare.py` tests how it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._store import Store, file_name

IDENTITY = {"make_module": "models.Net", "precisions": {"fp32": "AmpPrecision('fp32')"}}
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
    store = Store(tmp_path, IDENTITY)
    for label in LABELS:
        store.save(ArmRun(label, 0))
    assert [store.load(label, 0).label for label in LABELS] == LABELS
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*.json"))


def test_only_what_finished_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder", IDENTITY)
    store.save(ArmRun("fp32", 0, error="no"))
    assert store.load("fp32", 0) is None
    assert store.load("fp32", 1) is None
    store.save(ArmRun("fp32", 0))
    assert store.load("fp32", 0) == ArmRun("fp32", 0)


def test_a_file_that_was_copied_from_another_comparison(tmp_path: Path) -> None:
    Store(tmp_path / "other", {**IDENTITY, "make_module": "models.Other"}).save(ArmRun("fp32", 0))
    store = Store(tmp_path / "own", IDENTITY)
    (tmp_path / "own" / "fp32-seed0.json").write_bytes((tmp_path / "other" / "fp32-seed0.json").read_bytes())
    with pytest.raises(ValueError, match=r"fp32-seed0.json` is a run of another comparison"):
        store.load("fp32", 0)


def test_another_comparison_is_refused_by_name(tmp_path: Path) -> None:
    Store(tmp_path / "mine", IDENTITY)
    changed = {**IDENTITY, "make_module": "models.Other"}
    with pytest.raises(ValueError, match=r"mine' has another .*its `make_module`: models.Net, not models.Other"):
        Store(tmp_path / "mine", changed)
    assert json.loads((tmp_path / "mine" / "comparison.json").read_text())["comparison"] == IDENTITY


def test_work_folders(tmp_path: Path, memory_folder: str) -> None:
    assert Store(tmp_path, IDENTITY).work_folder("fp32", 1) == tmp_path / "fp32-seed1"
    assert Store(memory_folder, IDENTITY).work_folder("fp32", 1) is None
