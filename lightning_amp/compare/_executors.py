"""Send runs to an executor, wait for them, and repeat what is lost when a worker dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import platform
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._arguments import require
from lightning_amp.compare._pack import pack
from lightning_amp.compare._process import tail
from lightning_amp.compare._progress import Progress
from lightning_amp.compare._remote import Assignment, call_of, progress_of, runs_of, train, versions
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._worker import Task

_POLL_S = 0.1
_STOP_WITHIN_S = 15.0
"""Seconds for workers to see the file that stops them."""

_MISSING = re.compile(r"No module named '((?:lightning_amp|lightning|torch)(?:\.[\w.]+)?)'")
"""In the errors of workers that cannot import this package. Executors pass them on as text, each in its own words."""


def run_on(
    executor: Any, task: Task, dumps: Callable[[Any], bytes] = pickle.dumps, return_files: Sequence[str] = ()
) -> ArmRun:
    """Train one task on the executor, wait for it, and return its record.

    Args:
        executor: The executor.
        task: The training.
        dumps: How its factories are sent.
        return_files: Names of small files in the folder of the task, which are there afterwards.

    """
    found: list[ArmRun] = []
    assignment = Assignment(
        tasks=(pack(task, dumps),),
        folders=(task.work_folder,),
        files=(),
        versions=versions(),
        caller=(platform.node(), os.getpid()),
        return_files=tuple(return_files),
    )
    folder = Path(task.work_folder)
    Dispatcher(executor, Progress(1, None), lambda _, runs: found.extend(runs), lambda _: None, folder).run(
        [assignment]
    )
    return found[0]


def check_executor(executor: object) -> None:
    """Refuse an object that is no executor.

    Raises:
        ValueError: If it has no `submit`.

    """
    fine = executor is None or (callable(getattr(executor, "submit", None)) and not isinstance(executor, type))
    rule = "an object with `submit(fn, *args)`: an executor of `concurrent.futures`, Dask or submitit, `LocalDevices()`"
    require(fine, "executor", rule, executor, none="or `None`")


@final
class Dispatcher:
    """Trains assignments on the workers of an executor.

    Args:
        executor: Has `submit(fn, /, *args)`, which returns an object with `done()`, `result()` and perhaps `cancel()`.
        shown: Shows the progress of all runs at once.
        on_runs: Gets the runs of each assignment, when it has ended.
        on_unsaved: Gets the error of a worker that could not write its run.
        folder: A folder that workers may be able to read, in which the file is made that stops them.

    """

    def __init__(
        self,
        executor: Any,
        shown: Progress,
        on_runs: Callable[[Assignment, list[ArmRun]], None],
        on_unsaved: Callable[[str], None],
        folder: Path,
    ) -> None:
        self._executor, self._shown = executor, shown
        self._on_runs, self._on_unsaved = on_runs, on_unsaved
        self._stop_file = folder.absolute() / f".stop-{secrets.token_hex(8)}"
        self._jobs: dict[int, tuple[Assignment, Any]] = {}
        self._hosts: dict[int, str] = {}
        self._here: list[tuple[int, Assignment]] = []
        self._has_runs = False

    def run(self, assignments: Sequence[Assignment]) -> None:
        """Train all assignments, and return when the last one has ended.

        Raises:
            ValueError: If the workers cannot import the user's modules, or the executor returns no jobs.
            RuntimeError: If the workers lack this package or have other versions, or the executor takes no runs.
            KeyboardInterrupt: If it was interrupted. Nothing is queued or runs then, as far as the executor allows.

        """
        try:
            for number, assignment in enumerate(assignments):
                self._submit(number, replace(assignment, stop_file=str(self._stop_file)))
            while self._jobs:
                time.sleep(_POLL_S)
                for number in list(self._jobs):
                    self._look_at(number)
            for number, assignment in self._here:
                self._shown.start(assignment.name)
                self._answered(number, assignment, train(assignment))
        except BaseException:
            self._stop()
            raise

    def _submit(self, number: int, assignment: Assignment) -> bool:
        """Return whether the executor took the runs."""
        try:
            job = self._executor.submit(*call_of(assignment))
        except Exception as error:
            if not self._jobs and not self._has_runs:
                raise RuntimeError(f"`executor` takes no runs: {_shown(error)}.") from error
            self._failed(number, assignment, f"the executor takes no runs any more: {_shown(error)}")
            return False
        if not (callable(getattr(job, "done", None)) and callable(getattr(job, "result", None))):
            kind = type(job).__name__
            raise ValueError(f"`executor.submit` must return an object with `done()` and `result()`, got {kind}.")
        self._jobs[number] = assignment, job
        self._shown.start(assignment.name)
        return True

    def _look_at(self, number: int) -> None:
        assignment, job = self._jobs[number]
        if not job.done():
            host, share, text = progress_of(assignment.folders[0])
            self._hosts[number] = host or self._hosts.get(number, "")
            self._shown.move(share, f"{host}: {text}" if host not in ("", platform.node()) else text, assignment.name)
            return
        del self._jobs[number]
        try:
            answer = job.result()
        except (Exception, asyncio.CancelledError) as error:
            missing = _MISSING.search(str(error))
            if missing:
                _refuse(f"`{missing[1]}` is not installed there", assignment, error)
            self._lost(number, assignment, error)
        else:
            self._answered(number, assignment, answer)

    def _answered(self, number: int, assignment: Assignment, answer: Any) -> None:
        if "refused" in answer:
            _refuse(answer["refused"], assignment)
        if "cannot_import" in answer:
            raise ValueError(answer["cannot_import"])
        runs = runs_of(answer)
        killed = next((run for run in runs if run.killed_by), None)
        if killed is not None and not assignment.first_attempt:
            self._hosts[number] = killed.host
            self._lost(number, assignment, killed.error)
            return
        if killed is not None:
            runs = [_with_place(run, _kept_log(assignment, i)) for i, run in enumerate(runs)]
        if answer["unsaved"]:
            self._on_unsaved(answer["unsaved"])
        for folder, files in zip(assignment.folders, answer["files"], strict=True):
            for name, text in files.items():
                Path(folder).mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).write_text(text, encoding="utf-8")
        self._ended(assignment, runs)

    def _lost(self, number: int, assignment: Assignment, error: Any) -> None:
        """Repeat runs whose worker died; after the second time, they have failed."""
        host = self._hosts.get(number, "")
        lost = f"its worker was lost{host and f' on {host}'}: {_shown(error)}"
        if assignment.first_attempt:
            self._failed(number, assignment, f"{lost}; first attempt: {assignment.first_attempt}")
            return
        if isinstance(error, BrokenExecutor):  # a pool of processes on this machine, which takes nothing any more
            if not self._here:
                text = "The pool of `executor` broke when a process died. The runs that are left train here, in order."
                _messages.warn(text)
            # of the runs that fail together, those whose progress was seen had begun
            self._here.append((number, replace(assignment, first_attempt=lost) if host else assignment))
        elif self._submit(number, replace(assignment, first_attempt=lost)):
            self._shown.say(f"{assignment.name} is repeated: {lost}")

    def _failed(self, number: int, assignment: Assignment, error: str) -> None:
        runs: list[ArmRun] = []
        host = self._hosts.get(number, "")
        for i, task in enumerate(assignment.tasks):
            log, first = tail(Path(assignment.folders[i]) / "output.log"), assignment.first_attempt
            text = f"{error}.{_kept_log(assignment, i)}"
            runs.append(ArmRun(task.label, task.seed, error=text, host=host, first_attempt=first, log=log))
        self._ended(assignment, runs)

    def _ended(self, assignment: Assignment, runs: list[ArmRun]) -> None:
        self._has_runs = True
        self._on_runs(assignment, runs)

    def _stop(self) -> None:
        """Take runs out of the queue, and end those that run."""
        if not self._jobs:
            return
        with contextlib.suppress(OSError):
            self._stop_file.touch()
        try:
            for _, job in self._jobs.values():
                with contextlib.suppress(Exception):
                    job.cancel()
            deadline = time.monotonic() + _STOP_WITHIN_S
            while time.monotonic() < deadline and not all(job.done() for _, job in self._jobs.values()):
                time.sleep(_POLL_S)
        finally:
            self._stop_file.unlink(missing_ok=True)


def _with_place(run: ArmRun, log: str) -> ArmRun:
    """Return a run that was killed for the second time, with its host and its log in the error."""
    if run.killed_by is None:
        return run
    return replace(run, error=f"{run.error}, on {run.host}; first attempt: {run.first_attempt}.{log}")


def _kept_log(assignment: Assignment, number: int) -> str:
    """Return words for the log of a run; empty if it is in a temporary folder."""
    log = Path(assignment.folders[number]) / "output.log"
    stays = bool(assignment.files) and Path(assignment.files[number].path).parent == log.parent.parent
    return f" Log: {log}" if stays and log.exists() else ""


def _refuse(wrong: str, assignment: Assignment, error: BaseException | None = None) -> NoReturn:
    own = ", ".join(f"{name} {version}" for name, version in versions().items())
    raise RuntimeError(
        f"The workers of `executor` must have the same packages as this process: {wrong}. Here are {own}."
    ) from error


def _shown(error: Any) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:300]}..."
    return text if isinstance(error, str) else f"{type(error).__name__}: {text}".rstrip(": ")
