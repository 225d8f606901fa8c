"""Whole comparisons, whose arms run in this process; their folder, and their progress."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.compared import TRAINER, FailsInFp16, NoisyPrecision, Sea, Waves, here
from zoo.executors import VERSIONS

import lightning_amp
from lightning_amp.compare import Progress, Run, Spec, _compare
from lightning_amp.compare._store import Store, file_name


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run arms in this process, and return their names."""
    names: list[str] = []

    def run(spec: Spec, on_progress: Any) -> Run:
        names.append(f"{spec.label} {spec.seed}")
        return here(spec)

    monkeypatch.setattr(_compare, "run_in_process", run)
    return names


def compare(precisions: Any = ("fp32", "bf16"), module: Any = Waves, **kwargs: Any) -> lightning_amp.PrecisionReport:
    return lightning_amp.compare_precisions(module, Sea, precisions, **{"trainer_kwargs": TRAINER, **kwargs})


def test_arms_are_interleaved_and_the_control_is_last(ran: list[str]) -> None:
    report = compare(num_seeds=2, seed=5)
    assert ran == ["fp32 5", "bf16 5", "control 5", "control 6", "bf16 6", "fp32 6"]
    assert list(report.arms) == ["fp32", "bf16", "control"]
    assert report.arms["control"].is_control
    assert report.recommended is None
    assert str(report.verdict("bf16", "val_loss")) == "no margin"


def test_a_control_on_request(ran: list[str]) -> None:
    compare(control=True)
    assert ran == ["fp32 0", "bf16 0", "control 0"]
    ran.clear()
    compare(num_seeds=2, control=False)
    assert ran == ["fp32 0", "bf16 0", "bf16 1", "fp32 1"]


def test_verdicts(ran: list[str]) -> None:
    """Equal arms are not worse, an arm that is worse on purpose is, and one that fails decides nothing."""
    arms = {"a": "fp32", "b": "32-true", "worse": NoisyPrecision(), "fails": {"precision": "fp16"}}
    margins = {"val_loss": 0.01, "distance": 0.01, "thing": ("max", 10.0)}
    report = compare(arms, FailsInFp16, num_seeds=3, margins=margins)
    assert report.verdict("b", "val_loss").claim == "not worse"
    assert report.verdict("b", "distance").claim == "not worse"
    assert report.arms["b"].metrics["val_loss"].finals == report.arms["a"].metrics["val_loss"].finals
    assert report.verdict("worse", "val_loss").claim == "worse"
    assert report.verdict("worse", "distance").claim == "worse"
    assert report.arms["fails"].errors == dict.fromkeys(range(3), "ArithmeticError: no fp16 here | really\nnot")
    assert str(report.verdict("fails", "val_loss")) == "undecided: a run failed or is missing with 3 of 3 seeds"
    assert report.recommended in {"a", None}
    assert "worse" not in (report.recommended or "")
    control = report.arms["control"].metrics["val_loss"]
    assert 0 < max(map(abs, control.difference.values)) < 0.01
    assert control.verdict.claim == "not worse"


def test_finished_runs_are_kept(ran: list[str], tmp_path: Path) -> None:
    first = compare(dirpath=tmp_path / "kept")
    assert ran == ["fp32 0", "bf16 0"]
    ran.clear()
    again = compare(dirpath=tmp_path / "kept", margins={"val_loss": 0.1})
    assert ran == []
    assert again.arms["bf16"].runs == first.arms["bf16"].runs
    compare(("fp32", "bf16", "fp16"), dirpath=tmp_path / "kept")
    assert ran == ["fp16 0"]
    ran.clear()
    compare(dirpath=str(tmp_path / "kept"), num_seeds=2)
    assert ran == ["control 0", "control 1", "bf16 1", "fp32 1"]


@pytest.mark.parametrize("damage", ["", "{", '{"format": 1}', "\0\xff"])
@pytest.mark.few(2)
def test_a_run_whose_file_is_torn_runs_again(damage: str, ran: list[str], tmp_path: Path) -> None:
    compare(dirpath=tmp_path)
    (tmp_path / "bf16-seed0.json").write_text(damage, encoding="latin-1")
    ran.clear()
    compare(dirpath=tmp_path)
    assert ran == ["bf16 0"]
    assert json.loads((tmp_path / "bf16-seed0.json").read_text())["run"]["error"] is None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"precisions": {"fp32": "fp32", "bf16": "fp16"}}, r"precisions\['bf16'\]"),
        ({"precisions": ("bf16", "fp32")}, r"precisions\['control'\]"),  # it belongs to the first arm
        ({"module": FailsInFp16}, "make_module"),
        ({"trainer_kwargs": {**TRAINER, "max_epochs": 3}}, "trainer_kwargs"),
    ],
)
def test_the_folder_of_another_compare(changes: Any, differs: str, ran: list[str], tmp_path: Path) -> None:
    compare(control=True, dirpath=tmp_path / "mine")
    ran.clear()
    with pytest.raises(ValueError, match=f"mine' has another comparison .its `{differs}`"):
        compare(**changes, control=True, dirpath=tmp_path / "mine")
    assert ran == []


def make_with_a_table(table: Any) -> Waves:
    return Waves()


def test_settings_without_an_identity_are_refused(ran: list[str], tmp_path: Path) -> None:
    make = partial(make_with_a_table, torch.arange(2000.0))
    with pytest.raises(ValueError, match="must tell it from others; that of Tensor does not"):
        compare(("fp32",), make, dirpath=tmp_path)
    assert ran == []


@pytest.mark.parametrize(
    ("margins", "says"),
    [
        ({"val_los": 0.1}, r"got 'val_los'; it logs .*Did you mean 'val_loss'\?"),
        ({"val_loss": 0.1, "thing": 0.1}, r"which way 'thing' is better.*\(\"min\", 0.1\)"),
    ],
)
def test_a_margin_that_nobody_can_judge_ends_the_comparison_at_its_first_validation(
    margins: Any, says: str, ran: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        compare(margins=margins, dirpath=tmp_path / "new")
    assert ran == ["fp32 0"]
    assert len(json.loads((tmp_path / "new" / "fp32-seed0.json").read_text())["run"]["curves"]["val_loss"]) == 1
    compare(dirpath=tmp_path / "kept")
    ran.clear()
    with pytest.raises(ValueError, match=says):
        compare(margins=margins, dirpath=tmp_path / "kept", num_seeds=2)
    assert ran == []


@pytest.mark.parametrize("name", ["torch", "lightning", "lightning_amp"])
@pytest.mark.few(1)
def test_kept_runs_of_other_versions_are_refused_by_name(name: str, ran: list[str], tmp_path: Path) -> None:
    compare(dirpath=tmp_path)
    path = tmp_path / "bf16-seed0.json"
    data = json.loads(path.read_text())
    data["run"]["versions"][name] = "0.0.1"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"has another comparison \(its `{name}` in bf16-seed0"):
        compare(dirpath=tmp_path)
    assert json.loads(path.read_text()) == data
    data["run"]["error"] = "it failed"  # a failed run is not compared, and runs again
    path.write_text(json.dumps(data))
    compare(dirpath=tmp_path)
    assert ran == ["fp32 0", "bf16 0", "bf16 0"]


@pytest.mark.few(1)
def test_a_folder_at_a_url(ran: list[str], folder_url: str) -> None:
    compare(dirpath=folder_url)
    ran.clear()
    compare(dirpath=folder_url)
    assert ran == []
    with pytest.raises(ValueError, match="has another comparison"):
        compare(dirpath=folder_url, module=FailsInFp16)


def test_a_folder_that_becomes_full(ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_amp.compare import _store

    write = _store.write_atomically

    def full(path: Any, *args: Any, **kwargs: Any) -> None:
        if "seed0" in str(path):
            raise OSError(28, "No space left on device")
        write(path, *args, **kwargs)

    monkeypatch.setattr(_store, "write_atomically", full)
    with pytest.warns(UserWarning, match="could not write to .*No space left on device"):
        report = compare(dirpath=tmp_path)
    assert all(arm.finished for arm in report.arms.values())


def test_a_folder_that_cannot_be_made(ran: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        compare(dirpath=tmp_path / "file" / "kept")
    assert ran == []


def test_nothing_is_left_in_the_current_folder(ran: list[str], in_tmp_path: Path) -> None:
    compare(trainer_kwargs={"accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False})
    assert list(in_tmp_path.iterdir()) == []


def test_one_seed_needs_no_scipy(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    report = compare(margins={"val_loss": 0.1})
    assert str(report.verdict("bf16", "val_loss")).startswith("undecided: it takes at least three seeds")


# -- progress ---------------------------------------------------------------------------------------------------------


def test_a_line_for_each_run_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3) as shown:
        shown.set_description("fp32, seed 0")
        shown.tick()
        shown.finish("fp32, seed 0: 12 s")
        shown.finish("bf16, seed 0: kept from before")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "[1/3] fp32, seed 0: 12 s",
        "[2/3] bf16, seed 0: kept from before",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_with_the_arm_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(2) as shown:
        shown.set_description("fp32 [bold], seed 0")
        shown.finish("fp32 [bold], seed 0: 12 s")
        shown.set_description("bf16, seed 0")
        time.sleep(0.2)
        shown.tick()
    text = terminal.getvalue()
    assert "[1/2] fp32 [bold], seed 0: 12 s\n" in text
    assert "bf16, seed 0:  50%" in text
    assert "1/2 [00:0" in text


# -- the folder --------------------------------------------------------------------------------------------------------


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
