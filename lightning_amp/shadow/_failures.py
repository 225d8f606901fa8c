"""Describe a failure of a step that runs a second time, in words for the user."""

from __future__ import annotations

import traceback
from typing import NamedTuple

import torch
from typing_extensions import final

from lightning_amp._compat._messages import OUT_OF_MEMORY


@final
class Failure(NamedTuple):
    """An exception that ended a second run, in words: the exception itself would hold memory.

    Attributes:
        out_of_memory: Whether memory ran out.
        reason: The exception, in one line.
        text: The beginning of a sentence for the user.
    """

    out_of_memory: bool
    reason: str
    text: str

    @classmethod
    def of(cls, error: BaseException, what: str, where: str) -> Failure:
        """Describe an exception, and free its traceback with all objects that its frames hold.

        Args:
            error: The exception.
            what: The part of the user's code that ran a second time, for the sentence.
            where: The name of that run, for a sentence about memory.
        """
        for raised in filter(None, (error, error.__context__, error.__cause__)):
            traceback.clear_frames(raised.__traceback__)  # Python 3.10 also keeps the frames of these exceptions
        error.__traceback__ = error.__context__ = error.__cause__ = None
        if not is_out_of_memory(error):
            reason = in_one_line(error)
            return cls(False, reason, f"{what} could not be run a second time ({reason})")
        getattr(torch.get_device_module(), "empty_cache", lambda: None)()
        return cls(True, "out of memory", f"out of memory in {where}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that a device, or the host, has no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    )


def in_one_line(error: BaseException) -> str:
    """Return class and message of an exception: the first line of the message, or the last if it has a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1 if 'Traceback' in str(error) else 0]}"
