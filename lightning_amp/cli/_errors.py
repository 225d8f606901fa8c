"""The exit statuses of a command, and the exceptions that become one line instead of a traceback."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator

from lightning_amp._user_line import is_own_project, owner_of

FINE = 0
TO_DO = 1
"""Exit status if the user should act: a verdict is "worse", or an arm or a precision failed."""
WRONG_USE = 2
CRASHED = 70
"""Exit status for an error of this package, different from `TO_DO`; `EX_SOFTWARE` of sysexits.h."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell reports it: 128 plus the number of the signal."""
PIPE_CLOSED = 141
"""Exit status if the reader of the output has closed the pipe (`| head`), as a shell reports it."""

_REFUSALS = (ValueError, TypeError, ImportError, OSError, RuntimeError, FloatingPointError)
"""Exceptions that this package documents: something about the user's arguments, module or machine."""

_OPTIONS = {
    "make_module": "--model",
    "make_data": "--data",
    "trainer_kwargs": "--trainer.*",
    "num_seeds": "--seeds",
    "executor": "--devices-at-once",
    "num": "--devices-at-once",
    **{name: f"--{name}" for name in ("precisions", "precision", "margins", "seed", "control", "dirpath", "device")},
    "memory_limit_gib": "--memory-limit-gib",
    "tolerance": "--tolerance",
}
"""The options of arguments in Python."""


class UsageError(Exception):
    """The user asked for something impossible. `main` prints the text as one line: the fault, and what is legal."""


def usage_error(error: Exception) -> UsageError | None:
    """Turn an exception into one line; return `None` if it is an error of this package.

    The line names the last line of the user's own files, even if a library raised another exception from it. Without
    such a line, a library refused the user's code (a LightningModule without an optimizer), or this package refused an
    argument.
    """
    for raised in _chain(error):
        own = [frame for frame in traceback.extract_tb(raised.__traceback__) if is_own_project(frame.filename)]
        if own:
            place = f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}"
            return UsageError(f"{type(raised).__name__} in {place} (`{own[-1].name}`): {raised}")
    frames = traceback.extract_tb(error.__traceback__)
    if frames and owner_of(frames[-1].filename) not in ("ours", "Python"):
        return UsageError(f"{type(error).__name__}: {error}")
    return UsageError(as_options(str(error))) if isinstance(error, _REFUSALS) else None


def as_options(text: str) -> str:
    """Write the arguments in a message of this package as options: `--memory-limit-gib 4`."""
    names = "|".join(_OPTIONS)
    text = re.sub(r"`(margins|trainer_kwargs)\['([^`]*?)'\]`", lambda f: f"`--{f[1].partition('_')[0]}.{f[2]}`", text)
    text = re.sub(r"`precisions\['([^`]*?)'\]`", r"`--precisions \1`", text)
    text = re.sub(r"`\(\"(min|max)\", ([^)`]+)\)`", r"`\1:\2`", text)
    text = re.sub(rf"`({names})=([^`]*)`", lambda f: f"`{_OPTIONS[f[1]]} {f[2].lower()}`", text)
    return re.sub(rf"`({names})`", lambda f: f"`{_OPTIONS[f[1]]}`", text)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
