"""Run one training in a process of its own, and return its record, however the process ends."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp.compare._fork_server import CHILD, FORK_SERVER
from lightning_amp.compare._place import assigned
from lightning_amp.compare._run import ArmRun

IN_AN_ARM = "LIGHTNING_AMP_ARM"
"""Environment variable that is set in the process of an arm."""

RESULT = "result.json"
PROGRESS = "progress.json"
CANNOT_IMPORT = "cannot import"
"""Key of a result without a run: the factories could not be imported, and no other arm could import them either."""

OnProgress = Callable[[float | None, str], None]
"""Gets the share of the training that is done (`None` if unknown) and a text, several times a second."""

_LOG_LINES = 60
_RANKS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
)
"""Variables by which Lightning takes a process for a rank that somebody else started.

A run starts its ranks itself, in a job of Slurm as well.
"""


@final
@dataclass(frozen=True)
class PackedTask:
    """A training as bytes, and where another process finds the modules of the user.

    Attributes:
        label: The label of the arm.
        seed: The seed of the run.
        pickled: The task.
        origin: `sys.path`, the script, its arguments, and the settings of torch: JSON.
        one_process: Whether it trains in one process: without ranks that Lightning starts.

    """

    label: str
    seed: int
    pickled: bytes
    origin: Mapping[str, Any]
    one_process: bool


def run_packed(task: PackedTask, work_folder: str, on_progress: OnProgress) -> ArmRun:
    """Run a task in a new process, and return its record, or a record with the error that ended it.

    The process inherits the environment and the current folder, and has the torch settings (threads, TF32) of the
    process that packed the task. Its output goes to `output.log` in `work_folder`. The process is killed when this call
    is interrupted, and ends by itself when this process ends.

    Raises:
        ValueError: If the process cannot import the factories.
        KeyboardInterrupt: If it was interrupted; the process has ended by then.

    """
    started = time.time()
    place = assigned.get()
    base = {name: value for name, value in os.environ.items() if name not in _RANKS}
    base |= {IN_AN_ARM: "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = Path(work_folder).absolute() / "output.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        settings = dict(task.origin["settings"])
        if place.cores:
            settings["num_threads"] = min(settings["num_threads"], len(place.cores))
        environment = base | dict(place.environment)
        header = {
            **task.origin,
            "folder": name,
            "work_folder": str(work_folder),
            "settings": settings,
            "environment": environment,
            "cores": list(place.cores),
            "cwd": os.getcwd(),
            "log": str(log),
        }
        (folder / "task.pickle").write_bytes(task.pickled)
        (folder / "header.json").write_text(json.dumps(header), encoding="utf-8")

        def on_wait() -> None:
            if place.stop.is_set():
                raise KeyboardInterrupt
            on_progress(*_progress(folder))

        process = FORK_SERVER.fork(folder, base, task.origin["path"], on_wait) if task.one_process else None
        process = process or _new_process(folder / "header.json", log, environment)
        try:
            code = _wait(process, on_wait)
        finally:
            if process.poll() is None:
                _kill(process)
        run = _outcome(task, folder, log, code)
        return replace(run, host=platform.node(), started_at=started, ended_at=time.time())


def _new_process(header: Path, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, CHILD, str(header)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            # Ctrl-C must not reach the arm: Lightning would end the run early, as if it had finished
            start_new_session=True,
        )


def _wait(process: Any, on_wait: Callable[[], None]) -> int:
    """Return the exit status; `on_wait` is called at the start and several times a second."""
    while True:
        on_wait()
        for _ in range(10):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.02)


def _kill(process: Any) -> None:
    """Kill a process and all processes that it started. These processes have nothing to save."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _progress(folder: Path) -> tuple[float | None, str]:
    try:
        data = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        return data["share"], data["text"]
    except (OSError, ValueError, KeyError):  # the result file is missing or half written
        return None, "starting"


def _outcome(task: PackedTask, folder: Path, log: Path, code: int) -> ArmRun:
    try:
        data: Any = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = {}
    if CANNOT_IMPORT in data:
        raise ValueError(
            "The process of an arm could not import `make_module`, `make_data` or `trainer_kwargs`:"
            f" {data[CANNOT_IMPORT].rstrip('.')}. They have to be at the top level of a file that Python finds from"
            " here. Importing it must not fail or start a comparison: put only that call under"
            ' `if __name__ == "__main__":`.'
        )
    if isinstance(data, Mapping) and "run" in data:
        run = ArmRun.from_data(data["run"])
        if run.finished and code == 0:
            return run
        return replace(run, error=run.error or f"after training, its process {_ending(code)}", log=tail(log))
    left = " and left no result" if code >= 0 else ""
    error = f"its process {_ending(code)}{left}"
    return ArmRun(task.label, task.seed, error=error, killed_by=_signal_name(code), log=tail(log))


def _signal_name(code: int) -> str | None:
    """Return the name of the signal that ended a process; `None` if it ended by itself."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return str(-code)


def _ending(code: int) -> str:
    name = _signal_name(code)
    if name is None:
        return f"ended with exit status {code}"
    often = "; on Linux that is often the kernel, out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{often}"


def tail(log: Path) -> str:
    """Return the last lines of a log; empty if there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines[-_LOG_LINES:] if line.strip())
