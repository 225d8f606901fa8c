"""Show which run trains, how far it is, and how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from typing_extensions import final


@final
class Progress:
    """Shows progress on stderr: with a bar of rich on a terminal, otherwise with a line for each run that ended."""

    def __init__(self, total: int, bar: Any) -> None:
        self._total, self._bar, self._done, self._name = total, bar, 0, ""
        self._task = None if bar is None else bar.add_task("starting", total=total)

    def start(self, name: str) -> None:
        """Note that a run begins."""
        self._name = name

    def expect(self, total: int) -> None:
        """Correct the number of runs, finished ones included."""
        self._total = total
        self.move(None, "starting")

    def move(self, share: float | None, text: str) -> None:
        """Show how far the run is: its share from 0 to 1, or `None`, and a text."""
        if self._bar is not None:
            words = f"{self._name}: {text}".replace("[", "\\[")
            self._bar.update(self._task, total=self._total, completed=self._done + (share or 0.0), description=words)

    def finish(self, text: str) -> None:
        """Show how a run ended."""
        self._done += 1
        self._total = max(self._total, self._done)
        if self._bar is None:
            sys.stderr.write(f"[{self._done}/{self._total}] {text}\n")
            sys.stderr.flush()
        else:
            self.move(None, "ended")
            self._bar.console.print(text, highlight=False, markup=False)


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
        yield Progress(total, bar)
