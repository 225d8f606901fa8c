"""Show which arm runs, how far it is, and how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from typing_extensions import final


@final
class Progress:
    """Shows progress on stderr: with a bar of rich on a terminal, otherwise with a line for each run that ended.

    Args:
        total: Number of runs.
        rich's progress bar, and the id of its task; `None` without a terminal.

    """

    def __init__(self, total: int, bar: tuple[Any, Any] | None) -> None:
        self._total, self._bar = total, bar
        self._done = 0
        self._name = ""

    def start(self, name: str) -> None:
        """Show the name of the run that begins."""
        self._name = name
        self.move(None, "starting")

    def expect(self, total: int) -> None:
        """Correct the number of runs, finished ones included."""
        self._total = total
        self._update(total=total)

    def move(self, share: float | None, text: str) -> None:
        """Show how far the run is: a share from 0 to 1, or `None`, and a text."""
        name = f"{self._name}: {text}".replace("[", "\\[")
        self._update(completed=self._done + (share or 0.0), description=name)

    def finish(self, text: str) -> None:
        """Show how the run ended."""
        self._done += 1
        self.expect(max(self._total, self._done))
        self._update(completed=self._done)
        if self._bar is not None:
            self._bar[0].console.print(text, highlight=False, markup=False)
        else:
            sys.stderr.write(f"[{self._done}/{self._total}] {text}\n")
            sys.stderr.flush()

    def _update(self, **fields: Any) -> None:
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, **fields)


@contextmanager
def progress(total: int) -> Generator[Progress]:
    """Show a bar while inside."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        yield Progress(total, None)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Progress(total, None)
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Bar(*columns, console=console, transient=True) as bar:
        yield Progress(total, (bar, bar.add_task("starting", total=total)))
