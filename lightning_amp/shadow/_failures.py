"""What the user is told when a step fails as it runs a second time."""

from __future__ import annotations

import traceback
from typing import NamedTuple

import torch
from typing_extensions import final

from lightning_amp._compat._messages import OUT_OF_MEMORY


@final
class Failure(NamedTuple):
    """An exception that ended a second run, of which nothing is kept but words."""

    out_of_memory: bool
    reason: str
    """Of the exception alone, in one line."""
    text: str
    """Begins a sentence for the user."""

    @classmethod
    def of(cls, error: BaseException, what: str, where: str) -> Failure:
        """Describe an exception, and free the memory that it holds.

        Args:
            error: Its traceback is gone afterwards, and what its frames held: there may not be enough memory for it.
            what: Ran a second time.
            where: In which run of it memory may have run out.
        """
        for raised in filter(None, (error, error.__context__, error.__cause__)):
            traceback.clear_frames(raised.__traceback__)  # up to Python 3.10 the interpreter holds them, too
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
    """Return class and message of an exception: of a long message the first line, or what follows its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1 if 'Traceback' in str(error) else 0]}"
