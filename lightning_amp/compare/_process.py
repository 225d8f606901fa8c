"""Run one training in a process of its own, and return its record, however the process ends.

The process is one of this machine, or of a worker of an executor: another device, process or machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import platform
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp._compat import _names
from lightning_amp.compare._run import Run, from_data, to_data
from lightning_amp.compare._spec import Spec, pack, versions

IN_AN_ARM = "LIGHTNING_AMP_ARM"
"""Environment variable that is set in the process of an arm."""

RESULT = "result.json"

_CHILD = str(Path(__file__).with_name("_child.py"))
_LOG_LINES = 60
_RANKS = [
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *(f"SLURM_{name}" for name in ("NTASKS", "NTASKS_PER_NODE", "PROCID", "LOCALID", "NODEID")),
]
"""Variables by which Lightning takes a process for a rank that somebody else started.

A run starts its ranks itself, in a job of Slurm as well.
"""

_POLL_S = 0.1
_STOP_WITHIN_S = 5.0


@final
class Place(threading.local):
    """The part of this machine on which this thread's runs compute.

    Attributes:
        environment: Variables that select devices: `{"CUDA_VISIBLE_DEVICES": "3"}`.
        cores: Numbers of the CPU cores; empty: all that this process may use.
        stop: When it is set, the process of the run is killed.
        server: Forks the processes of this thread's runs.

    """

    environment: Mapping[str, str] = {}
    cores: Sequence[int] = ()
    stop: threading.Event | None = None
    server: Server | None = None

    def close(self) -> None:
        """End the server."""
        self.server = None


HERE = Place()


def run_in_process(spec: Spec, tick: Callable[[], object]) -> Run:
    """Train in a new process on this machine: see :func:`run_packed`."""
    return run_packed(pack(spec), tick)


def run_packed(header: dict[str, Any], tick: Callable[[], object] = lambda: None) -> Run:
    """Run a training in a new process on this machine, and return its record, or one with the error that ended it.

    The process inherits the environment and the current folder, and has the torch settings (threads, TF32) of the
    process that packed the run. Its output goes to `output.log` in its folder. It is killed when this call is
    interrupted, and ends by itself when this process ends.

    Args:
        header: The result of :func:`~lightning_amp.compare._spec.pack`.
        tick: Is called while the run trains, several times a second.

    Raises:
        KeyboardInterrupt: If it was interrupted; the process has ended by then.

    """
    started, settings = time.time(), header["settings"]
    most = len(HERE.cores) or (os.cpu_count() or 1 if header["host"] != platform.node() else settings["num_threads"])
    header = header | {
        "settings": {**settings, "num_threads": min(settings["num_threads"], most)},
        "cores": list(HERE.cores),
    }
    environment = {name: value for name, value in os.environ.items() if name not in _RANKS}
    environment |= {IN_AN_ARM: "1", "PYTHONUNBUFFERED": "1", **HERE.environment}
    with tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True) as name:
        folder, log = Path(name), Path(header["folder"]) / "output.log"
        try:
            log.parent.mkdir(exist_ok=True)
        except OSError:  # another machine, which does not share the folder
            header["folder"], log = name, folder / "output.log"
        log.write_bytes(b"")
        (folder / "spec.pickle").write_bytes(pickle.dumps({**header, "log": str(log.absolute())}))
        process = _start(name, environment, header["path"])
        try:
            while (code := process.poll()) is None:
                if HERE.stop is not None and HERE.stop.is_set():
                    raise KeyboardInterrupt
                tick()
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                _kill(process)
        run = _outcome(header, folder, log, code)
    return replace(run, host=platform.node(), started_at=started, ended_at=time.time())


def _start(folder: str, environment: dict[str, str], path: list[str]) -> subprocess.Popen[bytes] | Server:
    if sys.platform != "linux":  # where frameworks do not survive a fork
        return _new_process([folder], environment)
    key = environment, path, os.getcwd()
    if HERE.server is None or HERE.server.key != key or not HERE.server.fork(folder):
        HERE.server = Server(key)
        HERE.server.fork(folder)
    return HERE.server


def _new_process(arguments: list[str], environment: dict[str, str], **pipes: Any) -> Any:
    pipes = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL), **pipes}
    # a new session: Ctrl-C must not reach the arm, because Lightning would end the run early, as if it had finished
    return subprocess.Popen([sys.executable, _CHILD, *arguments], env=environment, start_new_session=True, **pipes)


def _kill(process: subprocess.Popen[bytes] | Server) -> None:
    """Kill a process and all processes that it started. These processes have nothing to save."""
    while process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # a fork that leads no group yet
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.01)


@final
class Server:
    """A process that has imported torch and Lightning, which takes seconds, and forks one run after the other.

    While a run trains, it has the methods of a `Popen` of that run. `multiprocessing` has such a server as well. It
    imports the user's script in each child, the workers of Dask may not start its processes, and its environment is
    the environment of its first use.

    Args:
        key: The environment, `sys.path` and current folder. Runs with another key need another server.

    """

    def __init__(self, key: tuple[dict[str, str], list[str], str]) -> None:
        self.key, self.pid = key, 0
        self._code: int | None = None
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._process = _new_process(["--serve", json.dumps(key[1]), _names.kind()], key[0], **pipes)

    def fork(self, folder: str) -> bool:
        """Start the run in `folder`; return whether the server lives."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(os.fsencode(folder) + b"\n")
        self.pid, self._code = int(self._process.stdout.readline() or 0), None
        return self.pid > 0

    def poll(self) -> int | None:
        """Return the exit status of the run; `None` while it runs. A server that died took its run with it."""
        if self._code is None and select.select([self._process.stdout], [], [], 0)[0]:
            self._code = int(self._process.stdout.readline() or -signal.SIGKILL)
        return self._code

    def __del__(self) -> None:
        with self._process:  # closes the pipes, and waits
            self._process.kill()


def _outcome(header: Mapping[str, Any], folder: Path, log: Path, code: int) -> Run:
    output = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    signals, tail = {-each.value: each.name for each in signal.Signals}, "\n".join(output[-_LOG_LINES:])
    name = signals.get(code, f"signal {-code}") if code < 0 else None  # `None`: the process ended by itself
    often = "; on Linux that is often the kernel, out of memory" if name == "SIGKILL" else ""
    ending = f"ended with exit status {code}" if name is None else f"was killed by {name}{often}"
    try:
        run = from_data(Run, json.loads((folder / RESULT).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        left = " and left no result" if name is None else ""
        error = f"its process {ending}{left}"
        return Run(header["label"], header["seed"], error=error, killed_by=name, log=tail)
    if run.finished and code == 0:
        return run
    return replace(run, error=run.error or f"after training, its process {ending}", log=tail)


# -- on an executor ----------------------------------------------------------------------------------------------------


def run_on(executor: Any, specs: Sequence[Spec]) -> Iterator[Run]:
    """Train on the workers of an executor, and return each run when it has ended.

    A worker that dies, refuses or has other packages is a failed run, and the others go on. If this is interrupted, no
    run is queued or runs afterwards, as far as the executor allows.
    """
    jobs: dict[int, Any] = {}
    try:
        for number, spec in enumerate(specs):
            jobs[number] = executor.submit(pickle.loads, pickle.dumps(Call(pack(spec))))
        while jobs:
            ended = [number for number, job in jobs.items() if job.done()]
            for number in ended:
                yield _run_of(jobs.pop(number), specs[number])
            time.sleep(0 if ended else _POLL_S)
    finally:
        for job in jobs.values():
            with contextlib.suppress(Exception):
                job.cancel()
        deadline = time.monotonic() + _STOP_WITHIN_S
        while time.monotonic() < deadline and not all(job.done() for job in jobs.values()):
            time.sleep(_POLL_S)


def _run_of(job: Any, spec: Spec) -> Run:
    try:
        return from_data(Run, job.result())
    except (Exception, asyncio.CancelledError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Run(spec.label, spec.seed, error=f"its worker was lost or refused it: {text[:300]}")


@final
class Call:
    """Unpickled, it is the data of the run that was packed. A worker does not import the user's modules.

    A worker without this package raises `ModuleNotFoundError` in `pickle.loads`. A worker of Dask that cannot read a
    call ends, and the caller would wait for ever.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        self._header = header

    def __reduce__(self) -> tuple[Any, ...]:
        return train_packed, (self._header,)


def train_packed(header: dict[str, Any]) -> dict[str, Any]:
    """Train in a process of this worker, and return the data of the run."""
    wanted, here = header["versions"], versions()
    wrong = [f"{name} is {here[name]}, not {version}" for name, version in wanted.items() if here[name] != version]
    if wrong:
        error = f"the worker on {platform.node()} has other packages: {', '.join(wrong)}"
        return to_data(Run(header["label"], header["seed"], error=error))
    own = [entry or os.getcwd() for entry in sys.path]
    header["path"] = [*own, *(entry for entry in header["path"] if entry not in own)]
    return to_data(run_packed(header))
