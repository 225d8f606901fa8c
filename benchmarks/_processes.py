"""Run commands in other processes, each with a time limit, and all of them within one deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from typing_extensions import final

from benchmarks._machine import ROOT

_TOLERANCE_S = 30.0
"""Seconds after the deadline in which a process that has begun may finish."""


@final
class Ended(NamedTuple):
    """A process that ended.

    Attributes:
        status: Its exit status; `None` if it was killed because it exceeded its own limit.
        reason: Why it failed, in one line; empty if its status is 0.
        wall_s: Seconds that it took.

    """

    status: int | None
    reason: str
    wall_s: float


@final
class Deadline:
    """Runs commands until a deadline.

    Args:
        limit_s: Seconds from now.

    """

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    def allows(self, estimated_s: float) -> bool:
        """Return whether a command of this duration would end in time."""
        return time.monotonic() + estimated_s <= self._end_s

    def run(self, command: Sequence[str], folder: Path, limit_s: float) -> Ended | None:
        """Run a command that prints into `printed.txt` and `errors.txt`.

        Args:
            command: The command.
            folder: The folder of these files.
            limit_s: Seconds after which it is killed.

        Returns:
            Its end; `None` if the deadline came before its own limit.

        """
        left_s = self._end_s + _TOLERANCE_S - time.monotonic()
        began_s = time.monotonic()
        printed, errors = folder / "printed.txt", folder / "errors.txt"
        with printed.open("wb") as out, errors.open("wb") as err:
            status = wait(command, out.fileno(), err.fileno(), min(limit_s, left_s))
        wall_s = round(time.monotonic() - began_s, 1)
        if status is None:
            return Ended(None, f"it was ended after {limit_s:.0f} s", limit_s) if limit_s <= left_s else None
        return Ended(status, "" if status == 0 else _reason(status, errors, printed), wall_s)


def wait(command: Sequence[str], output: int, errors: int, limit_s: float) -> int | None:
    """Run a command in its own session, because torch's compiler has children; return `None` if it was killed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=errors, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(status: int, *printed: Path) -> str:
    if status < 0:
        return f"its process was killed by signal {-status}"
    lines = [line for path in printed for line in reversed(path.read_text("utf-8", "replace").splitlines())]
    last = next((line.strip() for line in lines if line.strip()), "")
    return f"its process ended with status {status}: {last[:300]}"
