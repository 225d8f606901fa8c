"""Workers that cannot train, interrupts, and the way of runs to workers. The jobs run in this process."""

from __future__ import annotations

import pickle
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from zoo.compared import Waves
from zoo.executors import Inline, Job, always, assignment_of, compare, trained

from lightning_amp.compare import _executors, _remote
from lightning_amp.compare._fork_server import ForkServer
from lightning_amp.compare._process import PackedTask
from lightning_amp.compare._remote import Assignment, train
from lightning_amp.compare._run import ArmRun


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the process of a run, and return the names of the runs."""
    names: list[str] = []

    def run_packed(task: PackedTask, folder: str, on_progress: Callable[..., None]) -> ArmRun:
        names.append(f"{task.label} {task.seed}")
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    monkeypatch.setattr(_remote, "FORK_SERVER", ForkServer())  # a worker keeps its server to its end
    monkeypatch.setattr(_executors, "_POLL_S", 0.001)
    return names


# -- workers that cannot train -----------------------------------------------------------------------------------------


class Records(Inline):
    """Queues all jobs but the first, and keeps what is cancelled."""

    def __init__(self, change: Any = None) -> None:
        super().__init__(change, range(1000))
        self.cancelled: list[str] = []

    def submit(self, fn: Any, /, *args: Any) -> Any:
        job = super().submit(fn, *args)
        name, is_done = assignment_of(*args).name, job.done
        job.cancel = lambda: self.cancelled.append(name)
        job.done = lambda: name in self.cancelled or is_done()
        return job


def test_workers_with_another_version(monkeypatch: pytest.MonkeyPatch, ran: list[str], tmp_path: Path) -> None:
    own = _remote.versions()

    def change(fn: Any, assignment: Assignment) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(_remote, "versions", lambda: {**own, "torch": "1.2.3"})
            return fn(assignment)

    executor = Records(change)
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


def test_a_worker_without_the_package_can_read_what_is_sent() -> None:
    """Otherwise a worker of Dask ends, and the caller waits for ever. The call itself then raises the error."""
    executor = Inline()
    compare(executor, ("fp32",))
    sent = pickle.dumps(_remote.call_of(executor.assignments[0]))
    script = "import pickle, sys; fn, argument = pickle.loads(sys.stdin.buffer.read()); print('read'); fn(argument)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], input=sent, capture_output=True, check=False)
    assert done.stdout.split() == [b"read"]
    assert b"No module named 'lightning_amp'" in done.stderr


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
        name, stop = assignment_of(*args).name, Path(assignment_of(*args).stop_file)

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
            stop = Path(assignment_of(*args).stop_file)
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


def test_a_run_is_known_to_have_begun_before_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A first process takes seconds to start, and a worker may die in them."""
    seen: list[Any] = []

    def run_packed(task: PackedTask, folder: str, *_: Any) -> ArmRun:
        seen.append(_remote.progress_of(folder))
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    compare(Inline(), ("fp32",), dirpath=tmp_path)
    assert seen == [(platform.node(), None, "starting")]


def test_an_engine_that_repeats_a_run_itself(ran: list[str], tmp_path: Path) -> None:
    """Dask does so if a worker dies. The dead worker leaves its progress, by which the next one knows of it."""
    progress: list[bytes] = []

    def change(fn: Any, assignment: Assignment) -> Any:
        file = Path(assignment.folders[0]) / _remote.PROGRESS
        if assignment.tasks[0].label == "bf16":
            file.parent.mkdir()
            file.write_bytes(progress[0])
        return fn(assignment)

    def run_packed(task: PackedTask, folder: str, *_: Any) -> ArmRun:
        progress.append((Path(folder) / _remote.PROGRESS).read_bytes())
        return trained(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_remote, "run_packed", run_packed)
        report = compare(Inline(change), dirpath=tmp_path)
    assert [arm.runs[0].first_attempt for arm in report.arms.values()] == [
        "",
        f"its worker was lost on {platform.node()}",
    ]
    (tmp_path / "fp16-seed0").mkdir()
    (tmp_path / "fp16-seed0" / _remote.PROGRESS).write_text('{"host": "vm", "call": "of an earlier call"}')
    assert compare(Inline(), ("fp32", "fp16"), dirpath=tmp_path).arms["fp16"].runs[0].first_attempt == ""


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


def test_a_lambda_is_not_taken_for_another_one(ran: list[str], tmp_path: Path) -> None:
    """All lambdas of a file have the same name, so that a second call cannot know whether it has the same one."""
    for width in (16, 64):
        with pytest.warns(UserWarning, match="second call runs them again: the arguments hold `.*<lambda>`"):
            compare(Inline(), ("fp32",), module=lambda width=width: Waves(width), dirpath=tmp_path)
    assert ran == ["fp32 0", "fp32 0"]


def test_a_lambda_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ModuleNotFoundError, match="Run `pip install cloudpickle`, or move the factory"):
        compare(Inline(), module=lambda: Waves(16))
    compare(Inline())


def test_a_worker_that_cannot_make_the_folder_takes_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It returns the files that the caller wants, and the caller writes them where it wants them."""
    folders: list[str] = []

    def run_packed(task: PackedTask, folder: str, *_: Any) -> ArmRun:
        folders.append(folder)
        (Path(folder) / "facts.json").write_text("{}")
        return trained(task)

    monkeypatch.setattr(_remote, "run_packed", run_packed)
    executor = Inline()
    compare(executor, ("fp32",))
    # the second: a temporary folder of the caller, which another machine does not have
    for folder in (f"{__file__}/run", str(tmp_path / "of the caller" / "run")):
        changed = replace(executor.assignments[0], folders=(folder,), return_files=("facts.json", "none"))
        assert train(changed)["files"] == [{"facts.json": "{}", "none": ""}]
        assert folders[-1] != folder
        assert not Path(folders[-1]).exists()
    assert list(tmp_path.iterdir()) == []


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
