"""Train runs where an executor sends them: on another device, in another process, or on another machine.

The executor sends only an `Assignment`, the argument of :func:`train`. This file imports neither Lightning nor the
user's modules, so a worker starts the process of a run quickly.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp.compare._fork_server import FORK_SERVER
from lightning_amp.compare._process import PackedTask, run_packed
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._run_file import RunFile

PROGRESS = "progress.json"
"""File in the folder of a run, with the host on which it runs and its progress. It is removed when the run ends."""


@final
@dataclass(frozen=True)
class Assignment:
    """Holds all that travels to a worker: runs, which it trains one after the other, and their settings.

    Attributes:
        tasks: The runs.
        folders: A folder for the files of each run; a worker that cannot make it takes a temporary one.
        files: Where each run is kept; empty if runs are not kept.
        versions: Versions of the packages of the caller, and of Python.
        caller: Host and number of the process that sent it.
        return_files: Names of small files of a run's folder that the caller wants to have.
        stop_file: As soon as this file exists, the worker gives up.
        first_attempt: How the first attempt was lost, if this is the second.

    """

    tasks: tuple[PackedTask, ...]
    folders: tuple[str, ...]
    files: tuple[RunFile, ...]
    versions: Mapping[str, str]
    caller: tuple[str, int]
    return_files: tuple[str, ...] = ()
    stop_file: str = ""
    first_attempt: str = ""

    @property
    def name(self) -> str:
        """Return the name of the first run, for people."""
        task = self.tasks[0]
        return f"{task.label}, seed {task.seed}" if len(self.tasks) == 1 else f"speed of {', '.join(self._labels)}"

    @property
    def _labels(self) -> list[str]:
        return list(dict.fromkeys(task.label for task in self.tasks))


@final
class _Call:
    """Unpickled, it is the answer of :func:`train`."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def __reduce__(self) -> tuple[Any, ...]:
        return train, (self._assignment,)


def call_of(assignment: Assignment) -> tuple[Callable[[bytes], Any], bytes]:
    """Return a function of the standard library, and the argument with which it trains the runs and returns the answer.

    A worker without this package then raises `ModuleNotFoundError` in the call. A worker of Dask that cannot read a
    call ends, and the caller would wait for ever.
    """
    return pickle.loads, pickle.dumps(_Call(assignment))


def train(assignment: Assignment) -> dict[str, Any]:
    """Train the runs of an assignment, and keep each of them.

    Returns:
        `{"runs": [...], "files": [...], "unsaved": text}`, or `{"refused": text}` if no run can be trained here;
        `{"cannot_import": text}` if the user's modules cannot be imported here.

    """
    wrong = _other_versions(assignment.versions)
    if wrong:
        return {"refused": f"{wrong} on {platform.node()}"}
    if assignment.caller != (platform.node(), os.getpid()):
        FORK_SERVER.keep()
    answer: dict[str, Any] = {"runs": [], "files": [], "unsaved": ""}
    for number, task in enumerate(assignment.tasks):
        with tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as scratch:
            folder = _made(assignment.folders[number]) or Path(scratch)
            reports = _Reports(folder / PROGRESS, assignment.stop_file)
            first_attempt = assignment.first_attempt or reports.lost_attempt()
            reports.write(None, "starting")
            try:
                run = run_packed(_adapted(task, assignment.caller[0]), str(folder), reports)
            except ValueError as error:
                return {"cannot_import": str(error)}
            finally:
                (folder / PROGRESS).unlink(missing_ok=True)
            answer["files"].append({name: _text(folder / name) for name in assignment.return_files})
        run = replace(run, first_attempt=first_attempt)
        if assignment.files:
            try:
                assignment.files[number].write(run)
            except (OSError, ImportError, ValueError) as error:
                answer["unsaved"] = f"{platform.node()}: {type(error).__name__}: {error}"
        answer["runs"].append(run.to_data())
    return answer


def versions() -> dict[str, str]:
    """Return the versions that caller and workers have to share."""
    packages = {name: metadata.version(name).partition("+")[0] for name in ("torch", "lightning")}
    return {
        "lightning_amp": sys.modules["lightning_amp"].__version__,
        **packages,
        "Python": platform.python_version().rpartition(".")[0],
    }


def runs_of(answer: Mapping[str, Any]) -> list[ArmRun]:
    """Return the runs of an answer of :func:`train`."""
    return [ArmRun.from_data(data) for data in answer["runs"]]


def progress_of(folder: str) -> tuple[str, float | None, str]:
    """Return the host of a run, its share and a text; an empty host if it is not known."""
    try:
        data = json.loads((Path(folder) / PROGRESS).read_text(encoding="utf-8"))
        return data["host"], data["share"], data["text"]
    except (OSError, ValueError, KeyError):  # not started, not visible from here, or half written
        return "", None, "waits for a worker"


def _other_versions(theirs: Mapping[str, str]) -> str:
    try:
        own = versions()
    except metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return ", ".join(f"{name} is {own[name]}, not {wanted}" for name, wanted in theirs.items() if own[name] != wanted)


def _adapted(task: PackedTask, host_of_caller: str) -> PackedTask:
    """Return the task with this process's `sys.path` before the caller's, and no more threads than there are cores."""
    own = [entry or os.getcwd() for entry in sys.path]
    path = [*own, *(entry for entry in task.origin["path"] if entry not in own)]
    settings = dict(task.origin["settings"])
    if host_of_caller != platform.node():
        settings["num_threads"] = min(settings["num_threads"], os.cpu_count() or 1)
    return replace(task, origin={**task.origin, "path": path, "settings": settings})


def _made(folder: str) -> Path | None:
    try:
        Path(folder).mkdir(exist_ok=True)  # the folder around it is missing on a machine that does not share it
    except OSError:
        return None
    return Path(folder)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@final
class _Reports:
    """Writes the progress of a run into its folder, at most once a second, and ends a run that was given up."""

    def __init__(self, path: Path, stop_file: str) -> None:
        self._path, self._stop_file = path, stop_file
        self._next_s = 0.0

    def lost_attempt(self) -> str:
        """Return how an earlier attempt of the same call was lost, which its engine repeats; empty if there is none."""
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        return f"its worker was lost on {data['host']}" if data.get("call") == self._stop_file else ""

    def __call__(self, share: float | None, text: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + 1.0
            if os.path.exists(self._stop_file):
                raise KeyboardInterrupt
            self.write(share, text)

    def write(self, share: float | None, text: str) -> None:
        data = {"host": platform.node(), "call": self._stop_file, "share": share, "text": text}
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(data), encoding="utf-8")
            new.replace(self._path)
        except OSError:  # the progress is only shown
            pass
