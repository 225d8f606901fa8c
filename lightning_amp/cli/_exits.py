"""How the command ends: its exit statuses, and the exception behind "wrong use"."""

from __future__ import annotations

FINE = 0
TO_DO = 1
"""There is something to do: a verdict "worse", an arm or a precision that failed."""
WRONG_USE = 2
CRASHED = 70
"""An error of our own, which must not look like something to do; `EX_SOFTWARE` of sysexits.h."""
INTERRUPTED = 130
"""Ctrl-C, as a shell reports it: 128 and the number of the signal."""
PIPE_CLOSED = 141
"""Whoever reads the output has gone (`| head`), as a shell reports it."""


class UsageError(Exception):
    """The user asked for what cannot be done; the text says what, and what is legal. It becomes one line."""


class Interrupted(Exception):  # noqa: N818 - not an error
    """Ctrl-C where there is more to say than that; the text says it."""
