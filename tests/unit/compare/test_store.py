"""The folder of a comparison; `test_compare.py` tests how it is used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from zoo.executors import VERSIONS

from lightning_amp.compare import Run
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
