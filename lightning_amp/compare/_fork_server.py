"""Start the process of a run by a fork of a process that has imported torch and Lightning.

A new process imports them for several seconds. `multiprocessing` has such a server as well. It is not used here, for
three reasons. It imports the user's script in each child before our code runs, so an error there would not be in the
run's log. The workers of Dask are daemons, which may not start its processes. And there is one for the whole program,
whose environment is that of its first use.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import final

CHILD = str(Path(__file__).with_name("_child.py"))
"""The script of the process of a run, and of the server."""

_PID, _EXIT = "pid", "exit"
"""Files in the folder of a run, in which the server writes."""

_PRELOADED = ("lightning_amp.compare._worker", "torch._dynamo", "ctypes")
"""Imported before the first fork. An optimizer imports `torch._dynamo` in its first step."""


@final
class Fork:
    """The process of a run, with the methods of `subprocess.Popen` that are used here."""

    def __init__(self, server: subprocess.Popen[bytes], folder: Path) -> None:
        self._server, self._folder = server, folder
        self._code: int | None = None

    @property
    def pid(self) -> int | None:
        """Return its number; `None` before the fork."""
        return self._number(_PID)

    def poll(self) -> int | None:
        """Return its exit status; `None` while it runs."""
        if self._code is None:  # kept, because the folder is removed after the run
            gone = self._server.poll() is not None  # asked first: the server may write the status and end
            code = self._number(_EXIT)
            # the kernel kills the forks of a process that ends
            self._code = -signal.SIGKILL if code is None and gone else code
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: If it still runs after `timeout` seconds.

        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(0.01)
        return code

    def _number(self, name: str) -> int | None:
        try:
            return int((self._folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


@final
class _Server:
    def __init__(self, environment: Mapping[str, str], path: Sequence[str]) -> None:
        self._started_with = dict(environment), list(path)
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-amp-", ignore_cleanup_errors=True)
        header = Path(self._folder.name) / "header.json"
        header.write_text(json.dumps({"path": list(path)}), encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, CHILD, "--serve", str(header)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C must not reach it
        )
        self._forks: list[Fork] = []

    def fits(self, environment: Mapping[str, str], path: Sequence[str]) -> bool:
        """Return whether it lives, and libraries have read the same environment when they were imported."""
        return self._process.poll() is None and self._started_with == (dict(environment), list(path))

    @property
    def is_busy(self) -> bool:
        self._forks = [fork for fork in self._forks if fork.poll() is None]
        return bool(self._forks)

    def fork(self, folder: Path, on_wait: Callable[[], object]) -> Fork | None:
        """Start the run whose header is in `folder`; `None` if the server has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        fork = Fork(self._process, folder)
        try:
            stdin.write(f"{folder}\n".encode())
            stdin.flush()
            while fork.pid is None:  # the first time it imports torch and Lightning
                if self._process.poll() is not None:
                    return None
                on_wait()
                time.sleep(0.01)
        except BrokenPipeError:
            return None
        except BaseException:  # given up
            if not self.is_busy:
                self.close()
            raise
        self._forks.append(fork)
        return fork

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._folder.cleanup()


@final
class ForkServer:
    """Starts the processes of runs by forks, as long as somebody needs them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._num_users = 0

    @contextlib.contextmanager
    def warm(self) -> Generator[None]:
        """Keep the server for several runs. It ends with the last block that keeps it, or with this process."""
        self.keep()
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._close()

    def keep(self) -> None:
        """Keep the server until this process ends: in the worker of an executor, which gets one run after the other."""
        with self._lock:
            self._num_users += 1

    def fork(
        self,
        folder: Path,
        environment: Mapping[str, str],
        path: Sequence[str],
        on_wait: Callable[[], object] = lambda: None,
    ) -> Fork | None:
        """Start the run whose header is in `folder` by a fork.

        Args:
            folder: The folder of the run.
            environment: The environment of this process, in which a server is started if there is none.
            path: The run's `sys.path`.
            on_wait: Is called again and again until the run has started. If it raises, the run is given up.

        Returns:
            The process; `None` where a new process has to be started instead. This is so on other systems than Linux,
            outside of :meth:`warm`, and while a server with another environment is busy.

        """
        if sys.platform != "linux":  # macOS: frameworks of Apple do not survive a fork
            return None
        with self._lock:
            if not self._num_users:
                return None
            if self._server is not None and not self._server.fits(environment, path):
                if self._server.is_busy:
                    return None
                self._close()
            self._server = self._server or _Server(environment, path)
            return self._server.fork(folder, on_wait)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


FORK_SERVER = ForkServer()


# -- in the server -----------------------------------------------------------------------------------------------------


def serve(parent: int) -> tuple[dict[str, Any], float]:
    """Fork a process for each folder that is sent, and write its number and its exit status there.

    Returns:
        In a fork: the header of its run, and the time at which it began. In the server it does not return: the server
        ends with the process `parent`.

    """
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise the garbage collection of a fork would copy all this memory
    folders: dict[int, Path] = {}
    unread = b""
    while os.getppid() == parent:
        if select.select([0], [], [], 0.02 if folders else 0.5)[0]:
            unread += (read := os.read(0, 65536))
            if not read:
                break
            *lines, unread = unread.split(b"\n")
            for folder in map(Path, map(os.fsdecode, lines)):
                pid = os.fork()
                if not pid:
                    return _become(folder), time.time()
                folders[pid] = folder
                with contextlib.suppress(OSError):  # the run was given up, and its folder was removed
                    _put(folder, _PID, pid)
        while folders:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with contextlib.suppress(OSError):
                _put(folders.pop(pid), _EXIT, os.waitstatus_to_exitcode(status))
    os.kill(os.getpid(), signal.SIGKILL)  # at once, so that the kernel kills the forks as well
    raise AssertionError


def _become(folder: Path) -> dict[str, Any]:
    """Give this process what a new one would have: a session, output, environment, folder and path of its own."""
    os.setsid()
    header: dict[str, Any] = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    for number, path in enumerate((os.devnull, header["log"], header["log"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(header["environment"])
    os.chdir(header["cwd"])
    sys.path[:] = header["path"]
    sys.argv[1:] = [str(folder / "header.json")]  # Lightning starts other ranks with these arguments
    tempfile.tempdir = None
    return header


def _put(folder: Path, name: str, number: int) -> None:
    """Write a file that is never seen half written."""
    new = folder / f"{name}.new"
    new.write_text(str(number), encoding="utf-8")
    new.replace(folder / name)
