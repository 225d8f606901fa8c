"""Runs on executors. The jobs run in this process, and no run trains; `test_engines.py` has real engines."""

from __future__ import annotations

import json
import pickle
import platform
import sys
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
from zoo.executors import Inline, Job, trained

import lightning_amp
from lightning_amp.compare import _comparison, _executors, _remote
from lightning_amp.compare._process import PackedTask
from lightning_amp.compare._remote import PROGRESS, Assignment, train
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


def compare(executor: Any, precisions: Any = ("fp32", "bf16"), **kwargs: Any) -> lightning_amp.PrecisionReport:
    changes = {"trainer_kwargs": TRAINER, "executor": executor, **kwargs}
    return lightning_amp.compare_precisions(changes.pop("module", Waves), Sea, precisions, **changes)


def once(error: BaseException, label: str = "bf16") -> Callable[[Any, Assignment], Any]:
    """Lose the first attempt of the runs of an arm."""

    def change(fn: Any, assignment: Assignment) -> Any:
        if assignment.tasks[0].label == label and not assignment.first_attempt:
            raise error
        return fn(assignment)

    return change


def always(error: BaseException, label: str = "bf16") -> Callable[[Any, Assignment], Any]:
    def change(fn: Any, assignment: Assignment) -> Any:
        if assignment.tasks[0].label == label:
            raise error
        return fn(assignment)

    return change


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
            if args[0].tasks[0].label == "bf16":
                assert first.wait(30)
                job.cancel()
                pool.shutdown()
            return job

    blocker = threading.Event()
    pool.submit(lambda: (first.set(), blocker.wait(0.2)))
    report = compare(Pool())
    assert report.arms["fp32"].errors == {}
    assert "the executor takes no runs any more" in report.arms["bf16"].errors[0]


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
        folder = Path(args[0].folders[0])
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
def test_a_run_whose_process_is_killed(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_packed(task: PackedTask, *_: Any) -> ArmRun:
        ran.append(task.label)
        if task.label == "bf16" and ran.count("bf16") <= times:
            return failed("bf16", 0, "its process was killed by SIGKILL", killed_by="SIGKILL", host="node7")
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    report = compare(Inline())
    assert ran.count("bf16") == 2
    (run,) = report.arms["bf16"].runs
    assert run.finished == (times == 1)
    assert run.first_attempt == "its worker was lost on node7: its process was killed by SIGKILL"


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


# -- workers that cannot train -----------------------------------------------------------------------------------------


class Records(Inline):
    """Queues all jobs but the first, and keeps what is cancelled."""

    def __init__(self, change: Any = None) -> None:
        super().__init__(change, range(1000))
        self.cancelled: list[str] = []

    def submit(self, fn: Any, /, *args: Any) -> Any:
        job = super().submit(fn, *args)
        name, is_done = args[0].name, job.done
        job.cancel = lambda: self.cancelled.append(name)
        job.done = lambda: name in self.cancelled or is_done()
        return job


def test_workers_with_another_version(monkeypatch: pytest.MonkeyPatch, ran: list[str], tmp_path: Path) -> None:
    own = _remote.versions()
    monkeypatch.setattr(_remote, "versions", lambda: {**own, "torch": "1.2.3"})
    executor = Records()
    message = (
        rf"must have the same packages as this process: torch is 1\.2\.3, not {own['torch']} on .*Here are .*torch"
    )
    with pytest.raises(RuntimeError, match=message):
        compare(executor, dirpath=tmp_path)
    assert ran == []
    assert executor.cancelled == ["bf16, seed 0"]
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'lightning_amp'"), RuntimeError("...No module named 'torch.nn'\n")]
)
def test_workers_without_the_package(error: Exception, ran: list[str]) -> None:
    """Engines pass such an error on as text, each in its own words."""
    executor = Records(always(error, "fp32"))
    message = r"`(lightning_amp|torch.nn)` is not installed there\. Here are lightning_amp "
    with pytest.raises(RuntimeError, match=message):
        compare(executor)
    assert ran == []
    assert executor.cancelled == ["bf16, seed 0"]


def test_another_module_that_is_missing_is_an_error_of_the_run() -> None:
    report = compare(Inline(always(ModuleNotFoundError("No module named 'torchthing'"))))
    assert "No module named 'torchthing'" in report.arms["bf16"].errors[0]


def test_workers_that_cannot_import_the_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_packed(*_: Any) -> ArmRun:
        raise ValueError("The process of an arm could not import `make_module`")

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    executor = Records()
    with pytest.raises(ValueError, match="could not import `make_module`"):
        compare(executor)
    assert executor.cancelled == ["bf16, seed 0"]


def test_workers_that_cannot_write_the_folder(tmp_path: Path) -> None:
    """The caller writes the runs instead, and warns once."""

    def change(fn: Any, assignment: Assignment) -> Any:
        files = [replace(file, path=f"{__file__}/{Path(file.path).name}") for file in assignment.files]
        return fn(replace(assignment, files=tuple(files)))

    with pytest.warns(UserWarning, match="could not write to .*Not a directory|could not write to .*exists") as caught:
        report = compare(Inline(change), dirpath=tmp_path)
    assert len(caught) == 1
    assert platform.node() in str(caught[0].message)
    assert all(arm.finished for arm in report.arms.values())
    assert sorted(path.name for path in tmp_path.glob("*-seed0.json")) == ["bf16-seed0.json", "fp32-seed0.json"]


# -- interrupts --------------------------------------------------------------------------------------------------------


class Interrupts(Records):
    """Interrupts the caller while the first job runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stop_files: list[bool] = []

    def submit(self, fn: Any, /, *args: Any) -> Any:
        job = super().submit(fn, *args)
        name, stop = args[0].name, Path(args[0].stop_file)

        def is_done() -> bool:
            if not self.cancelled:
                raise KeyboardInterrupt
            self.stop_files.append(stop.exists())
            return name in self.cancelled

        job.done = is_done
        return job


def test_an_interrupt_cancels_all_jobs(ran: list[str], tmp_path: Path) -> None:
    """A file in the folder stops the workers of engines that cannot cancel, and is removed again."""
    executor = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        compare(executor, num_seeds=2, control=False, dirpath=tmp_path)
    assert len(executor.cancelled) == 4
    assert executor.stop_files
    assert all(executor.stop_files)
    assert ran == []
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


def test_an_interrupt_of_jobs_without_cancel(tmp_path: Path) -> None:
    stopped: list[bool] = []

    class Running:
        def submit(self, fn: Any, /, *args: Any) -> Job:
            stop = Path(args[0].stop_file)
            seen: list[int] = []

            def is_done() -> bool:
                seen.append(0)
                if len(seen) == 2:
                    raise KeyboardInterrupt
                stopped.append(stop.exists())
                return stop.exists()

            return Job(lambda: fn(*args), is_done)

    with pytest.raises(KeyboardInterrupt):
        compare(Running(), ("fp32",), dirpath=tmp_path)
    assert stopped == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


def test_a_worker_sees_the_file_that_stops_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard: list[Any] = []

    def run_packed(task: PackedTask, folder: str, on_progress: Callable[..., None]) -> ArmRun:
        on_progress(0.25, "step 1")
        heard.append(_remote.progress_of(folder))
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    executor = Inline()
    compare(executor, ("fp32",), dirpath=tmp_path)
    assert heard == [(platform.node(), 0.25, "step 1")]
    (assignment,) = executor.assignments
    assert _remote.progress_of(assignment.folders[0])[0] == ""
    Path(assignment.stop_file).touch()
    with pytest.raises(KeyboardInterrupt):
        train(assignment)


# -- folders and factories ---------------------------------------------------------------------------------------------


def test_the_folder_of_another_comparison(ran: list[str], tmp_path: Path) -> None:
    compare(Inline(), dirpath=tmp_path)
    ran.clear()
    executor = Inline()
    with pytest.raises(ValueError, match=r"has another comparison .its `precisions\['bf16'\]`"):
        compare(executor, {"fp32": "fp32", "bf16": "fp16"}, dirpath=tmp_path)
    assert (ran, executor.assignments) == ([], [])


def test_a_factory_that_cannot_be_sent(ran: list[str]) -> None:
    lock = threading.Lock()

    def make() -> Waves:
        with lock:
            return Waves()

    with pytest.raises(ValueError, match=r"`make_module` cannot be sent to another process: TypeError: .*lock"):
        compare(Inline(), module=make)
    assert ran == []


def test_a_lambda_is_sent_by_value() -> None:
    executor = Inline()
    width = 16
    compare(executor, module=lambda: Waves(width))
    made = pickle.loads(executor.assignments[0].tasks[0].pickled).make_module()
    assert made.net[0].out_features == width
    with pytest.raises(ValueError, match="`make_module` is a lambda, which another process cannot import"):
        compare(None, module=lambda: Waves(width))


def test_a_lambda_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ModuleNotFoundError, match="Run `pip install cloudpickle`, or move the factory"):
        compare(Inline(), module=lambda: Waves(16))
    compare(Inline())


def test_a_worker_that_cannot_make_the_folder_takes_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns the files that the caller wants, and the caller writes them where it wants them."""
    folders: list[str] = []

    def run_packed(task: PackedTask, folder: str, *_: Any) -> ArmRun:
        folders.append(folder)
        (Path(folder) / "facts.json").write_text("{}")
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    executor = Inline()
    compare(executor, ("fp32",))
    changed = replace(executor.assignments[0], folders=(f"{__file__}/run",), return_files=("facts.json", "none"))
    assert train(changed)["files"] == [{"facts.json": "{}", "none": ""}]
    assert not Path(folders[-1]).exists()


def test_a_worker_with_fewer_cores_takes_fewer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's host the number of threads is the caller's, because the bits may depend on it."""
    threads: list[int] = []

    def run_packed(task: PackedTask, *_: Any) -> ArmRun:
        threads.append(task.origin["settings"]["num_threads"])
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    executor = Inline()
    compare(executor, ("fp32",))
    (assignment,) = executor.assignments
    (task,) = assignment.tasks
    many = replace(task, origin={**task.origin, "settings": {**task.origin["settings"], "num_threads": 5000}})
    for host in (platform.node(), "another"):
        train(replace(assignment, tasks=(many,), caller=(host, assignment.caller[1] * (host == platform.node()))))
    assert threads[1] == 5000
    assert threads[2] < 5000
