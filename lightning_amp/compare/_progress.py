"""Show which run trains, how far it is, and how long the rest takes."""

from __future__ import annotations

import sys

from tqdm import tqdm
from typing_extensions import final


@final
class Progress(tqdm):  # type: ignore[type-arg]
    """Shows progress on stderr: a bar on a terminal, and in any case a line for each run that ended."""

    def __init__(self, total: int) -> None:
        super().__init__(total=total, file=sys.stderr, disable=None, leave=False, dynamic_ncols=True)  # not in a pipe
        self._done = 0

    def begin(self, name: str) -> None:
        """Note that a run begins."""
        self.set_description(name)

    def tick(self) -> None:
        """Show the time so far, now and then."""
        self.update(0)

    def finish(self, text: str) -> None:
        """Show how a run ended."""
        self._done += 1
        self.total = max(self.total, self._done)
        self.write(f"[{self._done}/{self.total}] {text}", file=sys.stderr)
        self.update()
