"""Run one training in a process of its own, and return its record, however the process ends."""

from __future__ import annotations

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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from typing_extensions import final

from lightning_amp.compare._run import Run, from_data, to_data

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

    def use(self, environment: Mapping[str, str], cores: Sequence[int]) -> None:
        """Let this thread's runs have some devices or cores."""
        self.environment, self.cores = environment, cores

    def watch(self, stop: threading.Event | None) -> None:
        """Kill this thread's run as soon as `stop` is set."""
        self.stop = stop

    def fork(self, folder: str, log: str, key: tuple[dict[str, str], list[str], str]) -> Server | None:
        """Start a run by a fork; `None` if the process that forks has died."""
        if self.server is None or self.server.key != key:
            self.server = Server(key)
        return self.server if self.server.fork(folder, log) else None

    @contextlib.contextmanager
    def forking(self) -> Generator[None]:
        """Keep this thread's server while inside, and end it afterwards."""
        try:
            yield
        finally:
            self.server = None


HERE = Place()


def versions() -> dict[str, str]:
    """Return the versions on which values and speeds depend."""
    packages = {name: metadata.version(name).partition("+")[0] for name in ("torch", "lightning")}
    return {**packages, "lightning_amp": sys.modules["lightning_amp"].__version__}


def run_packed(header: dict[str, Any], tick: Callable[[], object] = lambda: None) -> Run:
    """Run a training in a new process on this machine, and return its record, or one with the error that ended it.

    The process inherits the environment and the current folder, and has the torch settings (threads, TF32) of the
    process that packed the run. Its output goes to `output.log` in its folder. It is killed when this call is
    interrupted, and ends by itself when this process ends.

    Args:
        header: The result of :func:`~lightning_amp.compare._spec.pack`, unpickled.
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
        (folder / "spec.pickle").write_bytes(pickle.dumps(header))
        process = _start(name, str(log.absolute()), environment, header)
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


def _start(
    folder: str, log: str, environment: dict[str, str], header: Mapping[str, Any]
) -> subprocess.Popen[bytes] | Server:
    # outside of Linux frameworks do not survive a fork
    if sys.platform == "linux" and header["one_process"]:
        fork = HERE.fork(folder, log, (environment, header["path"], os.getcwd()))
        if fork is not None:
            return fork
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, _CHILD, folder],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C must not reach the arm: Lightning would end the run early, as if it had finished
            start_new_session=True,
        )


def _kill(process: subprocess.Popen[bytes] | Server) -> None:
    """Kill a process and all processes that it started. These processes have nothing to save."""
    while process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # a fork that leads no group yet
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.01)


def _outcome(header: Mapping[str, Any], folder: Path, log: Path, code: int) -> Run:
    output = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    tail, name = "\n".join(output[-_LOG_LINES:]), _signal_name(code)
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


def _signal_name(code: int) -> str | None:
    """Return the name of the signal that ended a process; `None` if it ended by itself."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(-code, f"signal {-code}") if code < 0 else None


# -- forks -------------------------------------------------------------------------------------------------------------


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
        self._process = subprocess.Popen(
            [sys.executable, _CHILD, "--serve", json.dumps(key[1])],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=key[0],
            start_new_session=True,  # Ctrl-C must not reach it
        )

    def fork(self, folder: str, log: str) -> bool:
        """Start the run in `folder`, whose output goes to `log`; return whether the server lives."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps([folder, log])}\n".encode())
            self.pid, self._code = int(self._process.stdout.readline() or 0), None
        except BrokenPipeError:
            self.pid = 0
        return self.pid > 0

    def poll(self) -> int | None:
        """Return the exit status of the run; `None` while it runs. A server that died took its run with it."""
        out = self._process.stdout
        assert out is not None
        if self._code is None and select.select([out], [], [], 0)[0]:
            self._code = int(out.readline() or -signal.SIGKILL)
        return self._code

    def __del__(self) -> None:
        with self._process:  # closes the pipes, and waits
            self._process.kill()


# -- on a worker -------------------------------------------------------------------------------------------------------


@final
class Call:
    """Unpickled, it is the data of the run that was packed. A worker does not import the user's modules.

    A worker without this package raises `ModuleNotFoundError` in `pickle.loads`. A worker of Dask that cannot read a
    call ends, and the caller would wait for ever.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return train_packed, (self._packed,)


def train_packed(packed: bytes) -> dict[str, Any]:
    """Train in a process of this worker, and return the data of the run."""
    header = pickle.loads(packed)
    wanted, here = header["versions"], versions()
    wrong = [f"{name} is {here[name]}, not {version}" for name, version in wanted.items() if here[name] != version]
    if wrong:
        error = f"the worker on {platform.node()} has other packages: {', '.join(wrong)}"
        return to_data(Run(header["label"], header["seed"], error=error))
    own = [entry or os.getcwd() for entry in sys.path]
    header["path"] = [*own, *(entry for entry in header["path"] if entry not in own)]
    return to_data(run_packed(header))
