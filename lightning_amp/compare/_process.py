"""Run one training in a process of its own, and return its record, however the process ends."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_amp.compare import _child
from lightning_amp.compare._checks import IN_AN_ARM
from lightning_amp.compare._factories import main_module, source_files
from lightning_amp.compare._run import ArmRun
from lightning_amp.compare._worker import CANNOT_IMPORT, PROGRESS, RESULT, Task, process_settings

OnProgress = Callable[[float | None, str], None]
"""Gets the share of the training that is done (`None` if unknown) and a text, several times a second."""

_LOG_LINES = 60
_RANKS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


def run_in_process(task: Task, on_progress: OnProgress) -> ArmRun:
    """Run a task in a new process, and return its record, or a record with the error that ended it.

    The process inherits the environment, the current folder, `sys.path` and torch's settings (threads, TF32), and no
    other state. Its output goes to `output.log` in the task's folder. The process is killed when this call is
    interrupted, and ends by itself when this process ends.

    Raises:
        ValueError: If the process cannot import the factories.
        KeyboardInterrupt: If it was interrupted; the process has ended by then.

    """
    with tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        header = {
            "folder": name,
            "path": [entry or os.getcwd() for entry in sys.path],
            "main": main_module(),
            "files": source_files(task.make_module, task.make_data),
            "argv": sys.argv,
            "settings": process_settings(),
        }
        (folder / "task.pickle").write_bytes(pickle.dumps(task))
        (folder / "header.json").write_text(json.dumps(header), encoding="utf-8")
        Path(task.work_folder).mkdir(parents=True, exist_ok=True)
        log = Path(task.work_folder) / "output.log"
        with open(log, "wb") as output:
            code = _run([sys.executable, _child.__file__, str(folder / "header.json")], output, folder, on_progress)
        return _outcome(task, folder, log, code)


def _run(command: list[str], output: Any, folder: Path, on_progress: OnProgress) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in _RANKS}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**environment, IN_AN_ARM: "1", "PYTHONUNBUFFERED": "1"},
        # Ctrl-C must not reach the arm: Lightning would end the run early, as if it had finished
        start_new_session=True,
    )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.2)
            on_progress(*_progress(folder))
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
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


def _outcome(task: Task, folder: Path, log: Path, code: int) -> ArmRun:
    try:
        data: Any = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = {}
    if CANNOT_IMPORT in data:
        raise ValueError(
            "The process of an arm could not import `make_module`, `make_data` or `trainer_kwargs`:"
            f" {data[CANNOT_IMPORT]}. They have to be in a file that Python finds from here. Importing it must not fail"
            ' or start a comparison (put that under `if __name__ == "__main__":`).'
        )
    if isinstance(data, Mapping) and "run" in data:
        run = ArmRun.from_data(data["run"])
        if run.finished and code == 0:
            return run
        return replace(run, error=run.error or f"after training, its process {_ending(code)}", log=_tail(log))
    left = " and left no result" if code >= 0 else ""
    return ArmRun(task.label, task.seed, error=f"its process {_ending(code)}{left}", log=_tail(log))


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    often = "; on Linux that is often the kernel, out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{often}"


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines[-_LOG_LINES:] if line.strip())
