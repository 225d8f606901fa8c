"""Run a script in a process that begins with torch and Lightning in it: a fork of one that has only imported them.

That import takes more than four seconds, and the suite has dozens of such processes. For the rest the process is as a
new one: it has its own arguments, environment, folder, `sys.path`, `__main__` and random numbers, has imported neither
the script's modules nor this package, and at its end waits for its threads, calls what was registered with `atexit` and
lets go of what the script made. Only torch and Lightning are not taken apart, which takes a second and a half. Where a
fork may not work (with a GPU, or on another system than Linux), it is a new one. A test that is about the start of a
process, or about the very end of one, uses `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
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
    """What :func:`start` returns: a part of `subprocess.Popen`."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


def run_script(
    *command: str | Path, env: Mapping[str, str] = os.environ, cwd: Path | None = None, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *command], capture_output=True, text=True)` for a script and arguments."""
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
        out: For standard output.
        err: For standard error.
        env: All of its environment.
        cwd: By default that of this process.
        order: 0 or 1: processes of two orders iterate over sets of strings in two orders, as new processes do.

    """
    where = cwd or Path.cwd()
    if _forks():
        return _Fork(_server(order), [*map(str, command)], str(out), str(err), dict(env), str(where))
    with open(out, "ab") as printed, open(err, "ab") as said:
        return subprocess.Popen([sys.executable, *command], stdout=printed, stderr=said, env=env, cwd=where)


@functools.cache
def _forks() -> bool:
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


class _Server:
    """Another process, which forks when it is asked to."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHASHSEED")}
        # It ends at the end of its standard input, and with it at the latest when this process does.
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env=environment,
        )  # fmt: skip
        atexit.register(self.close)

    def close(self) -> None:
        self._process.communicate()
        self._said.close()

    def ask(self, **what: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(what), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._said.seek(0)
            raise RuntimeError(f"The process that forks has ended: {self._said.read()[-3000:]}")
        return json.loads(answer)


@functools.cache
def _server(order: int) -> _Server:
    del order
    return _Server()


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
        if self.poll() is None:  # until it has been told its end, the number is not given to another process
            os.kill(self._pid, 9)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


# -- in the other process ----------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer one line with another, until there are no more; in a fork: become the script, and return."""
    sys.path.pop(0)  # this folder, whose modules have common names
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork that looks for garbage among all that would copy it
    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            ended, status = os.waitpid(asked["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if not answer:
                become(**asked)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


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
    numpy.random.seed()  # `random` does that itself
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
    """Run it, print the exception it ends with, and return the exit code; that of a signal is negative."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    serve()
