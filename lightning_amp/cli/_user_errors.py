"""What the user's own code raised, in one line: which exception, and where."""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from lightning_amp._user_line import is_own_project, owner_of
from lightning_amp.cli._exits import UsageError


@contextmanager
def users_errors(*others: type[Exception]) -> Generator[None]:
    """Let what the user's own code raises be one line; what is ours comes out as it is.

    Args:
        others: What comes out as it is, too.

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
    """Turn an exception into one line; `None` if it is our own, which is an error of the command.

    The line names the last place in a file that is no library's, also where a library has raised another exception over
    it. Without one, the exception is that of a library about what the user wrote (a LightningModule without an
    optimizer), or ours about an argument.
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
