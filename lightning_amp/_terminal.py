"""Keep messages and progress bars on separate lines of the terminal."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext


def own_lines() -> AbstractContextManager[None]:
    """Return a context in which messages stand on other lines than the bars of tqdm, which are drawn again below."""
    tqdm = sys.modules.get("tqdm")
    return nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr)
