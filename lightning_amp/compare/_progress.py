"""Show which run trains, how far it is, and how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from typing_extensions import final


@final
class Progress:
    """Shows progress on stderr: a bar of tqdm on a terminal, and in any case a line for each run that ended."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._done, self._name = bar, 0, ""

    def start(self, name: str) -> None:
        """Note that a run begins."""
        self._name = name

    def expect(self, total: int) -> None:
        """Correct the number of runs, finished ones included."""
        self._bar.total = total

    def move(self, share: float | None, text: str) -> None:
        """Show how far the run is: its share from 0 to 1, or `None`, and a text."""
        self._bar.n = round(self._done + (share or 0.0), 2)
        self._bar.set_description(f"{self._name}: {text}")

    def finish(self, text: str) -> None:
        """Show how a run ended."""
        self._done += 1
        self._bar.total = max(self._bar.total, self._done)
        self._bar.write(f"[{self._done}/{self._bar.total}] {text}", file=sys.stderr)
        self.move(None, "ended")


@contextmanager
def progress(total: int) -> Generator[Progress]:
    """Show a bar while inside."""
    with tqdm(total=total, file=sys.stderr, disable=None, leave=False, dynamic_ncols=True) as bar:  # not in a pipe
        yield Progress(bar)
