"""The exit statuses of a command, and the exceptions that become one line instead of a traceback."""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager

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


class UsageError(Exception):
    """The user asked for something impossible. `main` prints the text as one line: the fault, and what is legal."""


class Interrupted(Exception):  # noqa: N818 - not an error
    """Ctrl-C, with a text that explains how to continue."""


@contextmanager
def documented_errors(*kinds: type[Exception]) -> Generator[None]:
    """Turn exceptions of these kinds, which a function documents, into one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        raise UsageError(str(error)) from error


@contextmanager
def users_errors(*others: type[Exception]) -> Generator[None]:
    """Turn exceptions of the user's code into one line.

    Leave errors of this package, and the kinds `others`, unchanged.
    """
    try:
        yield
    except (BrokenPipeError, UsageError, *others):
        raise
    except Exception as error:
        wrong = usage_error(error)
        if wrong is None:
            raise
        raise wrong from error


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
            return UsageError(f"{type(raised).__name__} in {place} (`{own[-1].name}`): {_text(raised)}")
    if isinstance(error, (ValueError, TypeError, ImportError)):
        return UsageError(_text(error))
    frames = traceback.extract_tb(error.__traceback__)
    if frames and owner_of(frames[-1].filename) != "ours":
        return UsageError(f"{type(error).__name__}: {_text(error)}")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())
