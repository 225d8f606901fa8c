"""Runs on executors. The jobs run in this process, and no run trains; `test_engines.py` has real engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.synthetic import failed
from zoo.compared import TRAINER, Sea, Waves
from zoo.executors import Inline, Job, always, assignment_of, compare, once, trained

from lightning_amp.compare import Comparison, _comparison, _executors, _remote
from lightning_amp.compare._process import PackedTask
from lightning_amp.compare._remote import PROGRESS, Assignment
from lightning_amp.compare._run import ArmRun

LOST = ConnectionError("node7 is gone")


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the process of a run, and return the names of the runs."""
    names: list[str] = []

    def run_packed(task: PackedTask, folder: str, on_progress: Callable[..., None]) -> ArmRun:
        names.append(f"{task.label} {task.seed}")
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    monkeypatch.setattr(_executors, "_POLL_S", 0.001)
    return names


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[], [8, 7, 6, 5, 4, 3, 2, 1, 0], [4, 0, 8, 2, 6, 1, 7, 3, 5]])
def test_the_order_in_which_runs_end_does_not_matter(
    order: list[int], monkeypatch: pytest.MonkeyPatch, ran: list[str], tmp_path: Path
) -> None:
    settings: Any = {"num_seeds": 3, "margins": {"val_loss": 0.1}}
    report = compare(Inline(order=order), **settings, dirpath=tmp_path)
    assert len(ran) == 9
    monkeypatch.setattr(_comparison, "run_in_process", lambda task, _: trained(task))
    expected = compare(None, **settings)
    assert {label: arm.runs for label, arm in report.arms.items()} == {
        label: arm.runs for label, arm in expected.arms.items()
    }
    assert [str(report.verdict(label, "val_loss")) for label in report.arms] == [
        str(expected.verdict(label, "val_loss")) for label in expected.arms
    ]
    ran.clear()
    assert str(compare(Inline(), **settings, dirpath=tmp_path)) == str(report)
    assert ran == []


def test_a_thread_pool(ran: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert all(arm.finished for arm in compare(pool).arms.values())
    assert sorted(ran) == ["bf16 0", "fp32 0"]


def test_short_runs_for_speed_are_one_job(ran: list[str], tmp_path: Path) -> None:
    """So one device measures all arms, one after the other, when nothing else of the comparison runs."""
    executor = Inline()
    report = compare(executor, measure_speed="alone", dirpath=tmp_path)
    assert [len(assignment.tasks) for assignment in executor.assignments] == [1, 1, 6]
    assert executor.assignments[2].name == "speed of fp32, bf16"
    assert ran[2:] == ["fp32 0", "bf16 0", "bf16 1", "fp32 1", "fp32 2", "bf16 2"]
    assert report.arms["bf16"].speed is not None
    assert len(report.arms["bf16"].speed_runs) == 3
    compare(executor, measure_speed="alone", dirpath=tmp_path)
    assert len(ran) == 8


# -- executors that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [object(), 3, ThreadPoolExecutor, "dask"])
def test_an_object_that_is_no_executor(executor: Any, ran: list[str]) -> None:
    with pytest.raises(ValueError, match=r"`executor` must be an object with `submit\(fn, \*args\)`.* or `None`; got"):
        compare(executor)
    assert ran == []


class ReturnsNothing:
    def submit(self, fn: Any, /, *args: Any) -> None:
        fn(*args)


def test_a_submit_that_returns_no_job() -> None:
    with pytest.raises(ValueError, match=r"must return an object with `done\(\)` and `result\(\)`, got NoneType"):
        compare(ReturnsNothing())


def test_an_executor_that_was_shut_down(ran: list[str]) -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="`executor` takes no runs: RuntimeError: cannot schedule new futures"):
        compare(pool)
    assert ran == []


class Closes(Inline):
    """Takes a number of jobs."""

    def __init__(self, number: int, change: Any = None) -> None:
        super().__init__(change)
        self._left = number

    def submit(self, fn: Any, /, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("cannot schedule new futures after shutdown")
        return super().submit(fn, *args)


def test_an_executor_that_is_shut_down_in_the_middle(ran: list[str], tmp_path: Path) -> None:
    """The runs that it does not take have failed, and the others are kept."""
    report = compare(Closes(3), num_seeds=2, control=False, dirpath=tmp_path)
    assert ran == ["fp32 0", "bf16 0", "bf16 1"]
    no_more = "the executor takes no runs any more: RuntimeError: cannot schedule new futures after shutdown."
    assert report.arms["fp32"].errors == {1: no_more}
    assert report.arms["bf16"].errors == {}
    ran.clear()
    assert compare(Inline(), num_seeds=2, control=False, dirpath=tmp_path).arms["fp32"].errors == {}
    assert ran == ["fp32 1"]


def test_jobs_that_a_shutdown_took_out_of_the_queue(ran: list[str]) -> None:
    """They are repeated once, and the executor does not take them."""
    first = threading.Event()
    pool = ThreadPoolExecutor(1)

    class Pool:
        def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
            def call() -> Any:
                first.set()
                return fn(*args)

            job = pool.submit(call)
            if assignment_of(*args).tasks[0].label == "bf16":
                assert first.wait(30)
                job.cancel()
                pool.shutdown()
            return job

    blocker = threading.Event()
    pool.submit(lambda: (first.set(), blocker.wait(0.2)))
    report = compare(Pool())
    assert report.arms["fp32"].errors == {}
    assert "the executor takes no runs any more" in report.arms["bf16"].errors[0]


def test_the_record_of_an_earlier_failure_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if the worker cannot write the run, or if it is lost."""
    with monkeypatch.context() as patch:
        patch.setattr(_remote, "run_packed", lambda task, *_: failed(task.label, task.seed))
        compare(Inline(), dirpath=tmp_path)

    def change(fn: Any, assignment: Assignment) -> Any:
        if assignment.tasks[0].label == "bf16":
            raise LOST
        return fn(replace(assignment, files=()))

    report = compare(Inline(change), dirpath=tmp_path)
    collected, missing = Comparison(Waves, Sea, ("fp32", "bf16"), trainer_kwargs=TRAINER, dirpath=tmp_path).collect()
    assert missing == []
    assert "node7 is gone" in collected.arms["bf16"].errors[0]
    assert {label: arm.runs for label, arm in collected.arms.items()} == {
        label: arm.runs for label, arm in report.arms.items()
    }


# -- workers that die --------------------------------------------------------------------------------------------------


def test_a_worker_that_is_lost_once(ran: list[str], tmp_path: Path) -> None:
    """The run is repeated, and the report says so; the verdict is the same."""
    settings: Any = {"num_seeds": 3, "margins": {"val_loss": 0.1}, "control": False}
    report = compare(Inline(once(LOST)), **settings, dirpath=tmp_path)
    expected = compare(Inline(), **settings)
    assert sorted(ran[:6]) == sorted(ran[6:])
    assert str(report.verdict("bf16", "val_loss")) == str(expected.verdict("bf16", "val_loss"))
    lost = "its worker was lost: ConnectionError: node7 is gone"
    assert [run.first_attempt for run in report.arms["bf16"].runs] == [lost] * 3
    assert [run.first_attempt for run in report.arms["fp32"].runs] == [""] * 3
    assert [replace(run, first_attempt="") for run in report.arms["bf16"].runs] == list(expected.arms["bf16"].runs)
    assert "node7 is gone" in report.to_markdown()
    assert "node7 is gone" not in expected.to_markdown()
    kept = json.loads((tmp_path / "bf16-seed1.json").read_text())
    assert kept["run"]["first_attempt"] == lost


def test_a_repeated_run_is_said_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    compare(Inline(once(LOST)))
    err = capsys.readouterr().err
    assert "bf16, seed 0 is repeated: its worker was lost: ConnectionError: node7 is gone\n" in err
    assert "s, after a worker was lost\n" in err


class Dies:
    """Shows its progress from another host, writes a log, and is lost."""

    def submit(self, fn: Any, /, *args: Any) -> Job:
        folder = Path(assignment_of(*args).folders[0])
        seen: list[bool] = []

        def is_done() -> bool:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PROGRESS).write_text(json.dumps({"host": "node7", "share": 0.5, "text": "step 3"}))
            (folder / "output.log").write_text("the last line\n")
            seen.append(True)
            return len(seen) > 1

        def call() -> Any:
            raise LOST

        return Job(call, is_done)


def test_a_worker_that_is_lost_twice(tmp_path: Path) -> None:
    """The error of the run names the host, both attempts and the log."""
    report = compare(Dies(), ("fp32",), dirpath=tmp_path)
    (run,) = report.arms["fp32"].runs
    lost = "its worker was lost on node7: ConnectionError: node7 is gone"
    log = tmp_path / "fp32-seed0" / "output.log"
    assert run.error == f"{lost}; first attempt: {lost}. Log: {log}"
    assert (run.host, run.first_attempt, run.log) == ("node7", lost, "the last line")
    assert json.loads((tmp_path / "fp32-seed0.json").read_text())["run"]["error"] == run.error


def test_one_arm_that_is_always_lost_leaves_the_others(ran: list[str]) -> None:
    report = compare(Inline(always(LOST)), num_seeds=2, control=False)
    assert list(report.arms["bf16"].errors) == [0, 1]
    assert report.arms["fp32"].errors == {}
    assert ran == ["fp32 0", "fp32 1"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_whose_process_is_killed(times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def run_packed(task: PackedTask, *_: Any) -> ArmRun:
        ran.append(task.label)
        if task.label == "bf16" and ran.count("bf16") <= times:
            return failed("bf16", 0, "its process was killed by SIGKILL", killed_by="SIGKILL", host="node7")
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    report = compare(Inline(), dirpath=tmp_path)
    assert ran.count("bf16") == 2
    (run,) = report.arms["bf16"].runs
    assert json.loads((tmp_path / "bf16-seed0.json").read_text())["run"]["error"] == run.error
    assert run.finished == (times == 1)
    assert run.first_attempt == "its worker was lost on node7: its process was killed by SIGKILL"


@pytest.mark.parametrize("dirpath", [None, "memory://killed", "kept"])
def test_a_log_is_named_if_it_stays(dirpath: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a folder on this machine, logs are in a temporary folder."""

    def run_packed(task: PackedTask, folder: str, *_: Any) -> ArmRun:
        (Path(folder) / "output.log").touch()
        return failed(task.label, task.seed, "its process was killed by SIGKILL", killed_by="SIGKILL")

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    monkeypatch.chdir(tmp_path)
    (run,) = compare(Inline(), ("fp32",), dirpath=dirpath).arms["fp32"].runs
    log = tmp_path / "kept" / "fp32-seed0" / "output.log"
    assert str(run.error).partition(" Log: ")[2] == (str(log) if dirpath == "kept" else "")


def test_an_error_of_the_run_itself_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_packed(task: PackedTask, *_: Any) -> ArmRun:
        ran.append(task.label)
        return failed(task.label, task.seed)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    assert compare(Inline()).arms["bf16"].errors == {0: "OutOfMemoryError: CUDA out of memory."}
    assert ran == ["fp32", "bf16"]


def test_a_pool_of_processes_that_breaks(ran: list[str]) -> None:
    """Such a pool takes nothing any more, so that the runs that are left train here."""
    broken = BrokenProcessPool("A process in the process pool was terminated abruptly")
    with pytest.warns(UserWarning, match="pool of `executor` broke.* The runs that are left train here") as caught:
        report = compare(Inline(once(broken)), num_seeds=2, control=False)
    assert len(caught) == 1
    assert ran == ["fp32 0", "fp32 1", "bf16 0", "bf16 1"]
    assert all(arm.finished for arm in report.arms.values())
