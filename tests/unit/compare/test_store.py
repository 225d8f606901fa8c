"""The folder of a comparison; `test_compare.py` tests how it is used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from zoo.executors import VERSIONS

from lightning_amp._files import write_atomically
from lightning_amp.compare import Run, _store
from lightning_amp.compare._store import Store, file_name

SETTINGS = {"make_module": "models.Net", "trainer_kwargs": "{'max_epochs': 1}"}
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


def made(label: str, seed: int = 0, **fields: Any) -> Run:
    return Run(label, seed, versions=VERSIONS, **fields)


def test_every_label_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = [file_name(label, 0) for label in LABELS]
    assert len({name.lower() for name in names}) == len(LABELS)
    assert file_name("fp32", 3) == "fp32-seed3"
    store = Store(tmp_path, SETTINGS, dict.fromkeys(LABELS, "text"))
    for label in LABELS:
        store.save(made(label))
    assert [run and run.label for run in (store.load(label, 0) for label in LABELS)] == LABELS
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*.json"))


def test_only_what_finished_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder", SETTINGS, ARMS)
    store.save(made("fp32", error="no"))
    assert store.load("fp32", 0) is None
    assert store.load("fp32", 0, failed=True) == made("fp32", error="no")
    assert store.load("fp32", 1) is None
    store.save(made("fp32"))
    assert store.load("fp32", 0) == made("fp32")


@pytest.mark.parametrize(
    ("settings", "arms", "says"),
    [
        ({**SETTINGS, "make_module": "models.Other"}, ARMS, "its `make_module` in fp32-seed0.json differs"),
        (SETTINGS, {"fp32": "AmpPrecision('fp32', fp32_modules=['head'])"}, r"its `precisions\['fp32'\]` in"),
    ],
)
@pytest.mark.parametrize("error", [None, "it failed"])
def test_another_comparison_is_refused_by_name(
    settings: Any, arms: Any, says: str, error: str | None, tmp_path: Path
) -> None:
    """A failed run of another comparison is not overwritten either."""
    Store(tmp_path / "mine", SETTINGS, ARMS).save(made("fp32", error=error))
    with pytest.raises(ValueError, match=rf"mine' has another comparison \({says}"):
        Store(tmp_path / "mine", settings, arms).load("fp32", 0)


def test_the_folder_of_the_runs_own_files(tmp_path: Path, memory_folder: str) -> None:
    assert Store(tmp_path, SETTINGS, ARMS).folder == tmp_path
    assert Store(memory_folder, SETTINGS, ARMS).folder is None


def test_another_precision_and_other_seeds_may_be_added(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, ARMS).save(made("fp32"))
    more = Store(tmp_path, SETTINGS, {"fp32": ARMS["fp32"], "fp16": "AmpPrecision('fp16')"})
    more.save(made("fp16", 1))
    assert [more.load("fp32", 0), more.load("fp16", 0), more.load("fp16", 1)] == [made("fp32"), None, made("fp16", 1)]


def test_two_writers_of_one_run_never_leave_half_a_file(tmp_path: Path) -> None:
    """A reader sees, at any time, the whole run of one of them."""
    store = Store(tmp_path, SETTINGS, ARMS)
    runs = [made("fp32", num_steps=number, log=str(number) * 200_000) for number in (1, 2)]
    store.save(runs[0])
    writers = [threading.Thread(target=lambda run=run: [store.save(run) for _ in range(20)]) for run in runs]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert store.load("fp32", 0) in runs
    assert store.load("fp32", 0) in runs
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".json"] == []


def test_a_folder_that_becomes_full_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, SETTINGS, ARMS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_store, "write_atomically", full)
    with pytest.warns(UserWarning, match="could not write to .*No space left on device"):
        store.save(made("fp32"))
    monkeypatch.setattr(_store, "write_atomically", write_atomically)
    store.save(made("fp32"))
    assert store.load("fp32", 0) == made("fp32")
