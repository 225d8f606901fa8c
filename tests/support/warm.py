"""Run a script in a fork of a process that has already imported torch and Lightning.

That import takes more than four seconds, and the suite has dozens of such processes. Otherwise the fork is like a new
process. It has its own arguments, environment, folder, `sys.path`, `__main__` and random numbers, and has not imported
the script's modules or this package. At its end it waits for its threads, calls `atexit` functions, and frees the
script's objects. It does not unload torch and Lightning, which would take a second and a half. With a GPU, and on other
systems than Linux, a fork may not work, so a new process is started. A test of the start or the very end of a process
uses `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

PRELOADED = ("numpy", "torch", "lightning.pytorch", "sklearn.datasets", "matplotlib")


class Process(Protocol):
    """The part of `subprocess.Popen` that :func:`start` returns."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


def run_script(
    *command: str | Path, env: Mapping[str, str] = os.environ, cwd: Path | None = None, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run([sys.executable, *command], capture_output=True, text=True)` does for a script."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(*command, out=out, err=err, env=env, cwd=cwd)
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            code = process.poll()
        finally:
            process.kill()
            process.wait()
        printed, said = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
    if code is None:
        raise subprocess.TimeoutExpired(list(map(str, command)), timeout_s, printed, said)
    return subprocess.CompletedProcess(list(map(str, command)), code, printed, said)


def start(
    *command: str | Path,
    out: Path,
    err: Path,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    order: int = 0,
) -> Process:
    """Start a script. Its output is appended to the files `out` and `err`, which may be the same.

    Args:
        command: The script and its arguments.
        out: File for standard output.
        err: File for standard error.
        env: Its whole environment.
        cwd: Its folder; by default the folder of this process.
        order: 0 or 1. Processes of different orders iterate over sets of strings differently, as new processes do.

    """
    where = cwd or Path.cwd()
    if _forks():
        return _Fork(_server(order), [*map(str, command)], str(out), str(err), dict(env), str(where))
    with open(out, "ab") as printed, open(err, "ab") as said:
        return subprocess.Popen([sys.executable, *command], stdout=printed, stderr=said, env=env, cwd=where)


def as_ranks() -> list[str]:
    """Return arguments for torchrun in front of a script, so that its ranks are forks too."""
    return [__file__, "as", _server(0).address, _server(1).address] if _forks() else []


@functools.cache
def _forks() -> bool:
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


class _Server:
    """The process that forks on request, one for all workers of a test run."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process: subprocess.Popen[str] | None = None
        self._socket, self._lines = self._connect()
        atexit.register(self.close)

    def _connect(self) -> tuple[socket.socket, Any]:
        """Connect to the process of another worker, or start one. Of two that start at once, the second ends."""
        deadline = time.monotonic() + 60
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(f"\0{self.address}")  # not a file, so that none has to be removed
            except ConnectionRefusedError:
                connection.close()
                if time.monotonic() > deadline:
                    raise
            else:
                lines = connection.makefile("rw", encoding="utf-8")
                with contextlib.suppress(ConnectionError):
                    if lines.readline():
                        return connection, lines
                lines.close()
                connection.close()  # it was about to end
            if self._process is None or self._process.poll() is not None:
                environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHASHSEED")}
                self._process = subprocess.Popen(
                    [sys.executable, __file__, "serve", self.address], stdin=subprocess.DEVNULL, stdout=self._said,
                    stderr=self._said, env=environment,
                )  # fmt: skip
            time.sleep(0.02)

    def close(self) -> None:
        """Disconnect. The process ends when the last client has disconnected."""
        self._lines.close()
        self._socket.close()
        if self._process is not None:
            self._process.wait()
        self._said.close()

    def ask(self, **what: Any) -> Any:
        answer = ""
        send(self._lines, what)
        with contextlib.suppress(ConnectionError):
            answer = self._lines.readline()
        if not answer:
            self._said.seek(0)
            raise RuntimeError(f"The process that forks has ended: {self._said.read()[-3000:]}")
        return json.loads(answer)


@functools.cache
def _server(order: int) -> _Server:
    return _Server(f"warm-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}-{order}")


class _Fork:
    def __init__(self, server: _Server, argv: list[str], out: str, err: str, env: dict[str, str], cwd: str) -> None:
        self._server = server
        self._pid = server.ask(argv=argv, out=out, err=err, env=env, cwd=cwd)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.ask(pid=self._pid)
        return self._code

    def kill(self) -> None:
        if self.poll() is None:  # the number is not reused until the end was read
            os.kill(self._pid, 9)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


def run_as_this(address: str, argv: list[str]) -> int:
    """Run the script in the place of this process, which torchrun has started; return its exit code."""
    out, err = (os.readlink(f"/proc/self/fd/{number}") for number in (1, 2))
    process = _Fork(_Server(address), argv, out, err, dict(os.environ), os.getcwd())
    try:
        return process.wait()
    finally:
        process.kill()


# -- in the other process ----------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Answer requests until all clients have disconnected. In a fork, become the script."""
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(f"\0{address}")
    except OSError:  # another worker was faster
        return
    door.listen()
    sys.path.pop(0)  # this folder, whose modules have common names
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # garbage collection in a fork would copy all this memory
    clients: dict[socket.socket, Any] = {}
    came = False
    while clients or not came or select.select([door], [], [], 0)[0]:
        for one in select.select([door, *clients], [], [])[0]:
            if one is door:
                came, (connection, _) = True, door.accept()
                clients[connection] = connection.makefile("rw", encoding="utf-8")
                send(clients[connection], "welcome")
            elif line := clients[one].readline():
                asked = json.loads(line)
                if "pid" in asked:
                    ended, status = os.waitpid(asked["pid"], os.WNOHANG)
                    answer = os.waitstatus_to_exitcode(status) if ended else None
                else:
                    answer = os.fork()
                    if not answer:
                        for mine in (*clients.values(), *clients, door):
                            mine.close()
                        become(**asked)
                send(clients[one], answer)
            else:
                clients.pop(one).close()
                one.close()
    os._exit(0)  # without unloading torch and Lightning


def send(lines: Any, what: Any) -> None:
    """Write a line, unless the other side has disconnected."""
    with contextlib.suppress(ConnectionError):
        print(json.dumps(what), file=lines, flush=True)


def become(argv: list[str], out: str, err: str, env: dict[str, str], cwd: str) -> NoReturn:
    """Run the script as `python script arguments` does, and end."""
    for number, path in enumerate((os.devnull, out, err)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    script = os.path.abspath(argv[0])
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.argv, sys.path[:0] = argv, [os.path.dirname(script), *folders]
    tempfile.tempdir = None
    numpy, torch = sys.modules["numpy"], sys.modules["torch"]
    numpy.random.seed()  # `random` reseeds itself after a fork
    torch.seed()
    if "OMP_NUM_THREADS" in env:  # read when torch was imported
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    code = exit_code_of(lambda: exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    main.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:  # an interrupt ends it as a signal does
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def exit_code_of(run: Callable[[], None]) -> int:
    """Call `run`, print its exception, and return the exit code, which is negative for a signal."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(run_as_this(sys.argv[2 + int(os.environ["RANK"]) % 2], sys.argv[4:]))
