"""Recognise messages of torch, Python and jsonargparse by their text, because they have no other mark."""

from __future__ import annotations

import re

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|MemoryError|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)
"""Matches an exception or a log after running out of memory. Remove when all of torch raises `OutOfMemoryError`."""

FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
"""Matches a frame in a printed traceback: file, line, function. Remove when child processes send exceptions as data."""

SHARDING = re.compile(r"device_mesh|fully_shard|parallelize_module|FullyShardedDataParallel|FSDP")
"""Matches code that shards a module, or a traceback through it. Remove when Lightning says that a mesh is missing."""


def short_class_names(message: str) -> str:
    """Write `int` for `<class 'int'>`, as jsonargparse prints types. Remove when it prints plain names."""
    return re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", message)
