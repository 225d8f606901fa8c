"""Show which arms run, how far they are, and how long the rest takes."""

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
        self._shares: dict[str, float] = {}
        self._rows: dict[str, Any] = {}
        self._name = ""

    def start(self, name: str) -> None:
        """Note that a run begins, or is queued."""
        self._name = name
        self._shares[name] = 0.0
        if len(self._shares) == 1:
            self.move(None, "starting")

    def expect(self, total: int) -> None:
        """Correct the number of runs, finished ones included."""
        self._total = total
        self._update(total=total)

    def move(self, share: float | None, text: str, name: str | None = None) -> None:
        """Show how far a run is.

        Args:
            share: From 0 to 1, or `None`.
            text: Shown beside its name.
            name: Its name; `None`: the run that was started last.

        """
        name = self._name if name is None else name
        self._shares[name] = share or 0.0
        words = f"{name}: {text}".replace("[", "\\[")
        if len(self._shares) == 1 and not self._rows:
            self._update(completed=self._done + (share or 0.0), description=words)
            return
        if self._bar is not None:
            bar, _ = self._bar
            if name not in self._rows and share is not None:
                self._rows[name] = bar.add_task(words, total=1.0)
            if name in self._rows:
                bar.update(self._rows[name], completed=share or 0.0, description=words)
        self._show_total()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is not None:
            self._bar[0].console.print(text, highlight=False, markup=False)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def finish(self, text: str, name: str | None = None) -> None:
        """Show how a run ended; `name` is as for :meth:`move`."""
        name = self._name if name is None else name
        self._shares.pop(name, None)
        if self._bar is not None and name in self._rows:
            self._bar[0].remove_task(self._rows.pop(name))
        self._done += 1
        self.expect(max(self._total, self._done))
        self._show_total()
        self.say(text if self._bar is not None else f"[{self._done}/{self._total}] {text}")

    def _show_total(self) -> None:
        fields: dict[str, Any] = {"completed": self._done + sum(self._shares.values())}
        if self._rows:
            fields["description"] = f"{len(self._rows)} running, {len(self._shares) - len(self._rows)} waiting"
        self._update(**fields)

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
