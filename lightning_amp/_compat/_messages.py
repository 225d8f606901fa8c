"""Messages of torch, Python and jsonargparse that we recognise by their text, where nothing else tells."""

from __future__ import annotations

import re

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|MemoryError|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)
"""An exception, or the log of a process, that ran out of memory. Can go when all of torch raises `OutOfMemoryError`."""

FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
"""A frame in a printed traceback: file, line, function. Can go when a child process sends its exception as data."""


def is_unknown_option(message: str) -> bool:
    """Return whether argparse or jsonargparse refuses an option. Can go when they raise a class of its own for it."""
    return "nrecognized arguments" in message


def short_class_names(message: str) -> str:
    """Write `int` for `<class 'int'>`, as jsonargparse prints types. Can go when it prints them as one writes them."""
    return re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", message)
