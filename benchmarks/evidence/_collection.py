"""Run the parts one after the other, each in its own process."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import final

from benchmarks._machine import Machine
from benchmarks._processes import Deadline
from benchmarks.evidence._page import page
from benchmarks.evidence._parts import Part
from benchmarks.evidence._printed import crashed, last_lines
from benchmarks.evidence._record import Record, append, read
from lightning_amp._files import write_atomically
from lightning_amp._text import counted


@final
class Collection:
    """Runs the parts that are not on record yet, while there is time.

    Args:
        machine: The machine of the records.
        out: The folder of the results. Five files are written: `gpu.json`, `gpu.md`, `headline.json`, `headline.md`,
            and the page of the comparison.
        commit: The commit of the checkout.
        limit_s: Seconds for all parts.

    """

    def __init__(self, machine: Machine, out: Path, *, commit: str, limit_s: float) -> None:
        self._machine, self._out, self._commit = machine, out.resolve(), commit
        self._deadline = Deadline(limit_s)

    def go(self, parts: Sequence[Part], *, retry: bool = False) -> None:
        """Run the parts in order, report each, and write the page after each.

        Args:
            parts: The parts.
            retry: Run parts again that failed, took too long, or found a fault.

        """
        self._out.mkdir(parents=True, exist_ok=True)
        waiting = [part for part in parts if not self._is_done(part, retry)]
        print(f"{len(parts) - len(waiting)} of {len(parts)} parts are on record.", flush=True)
        for number, part in enumerate(waiting):
            if not part.missing and not self._deadline.allows(part.estimated_s):
                left = counted(len(waiting) - number, "part")
                print(f"Time is up, with {left} left. The same command goes on.", flush=True)
                return
            record = self._not_there(part) if part.missing else self._run(part)
            if record is None:
                print(f"Time was up in the middle of {part.name}. The same command goes on with it.", flush=True)
                return
            append(self._out / "gpu.json", record)
            write_page(self._out)
            print(f"{part.name}: {record.status} {record.reason}".rstrip() + f" ({record.wall_s:.0f} s)", flush=True)

    def _is_done(self, part: Part, retry: bool) -> bool:
        found = [r.status for r in read(self._out / "gpu.json") if (r.machine, r.part) == (self._machine, part.name)]
        return bool(found) and found[-1] != "not there" and (not retry or found[-1] == "done")

    def _run(self, part: Part) -> Record | None:
        """Run a part and return its record; `None` if the deadline came before its own limit."""
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            ended = self._deadline.run(part.command(self._out, work), work, part.limit_s)
            if ended is None:
                return None
            record = self._record(part)._replace(wall_s=ended.wall_s)
            if ended.status == 0 or (ended.status in part.results and not crashed(work)):
                return record._replace(status="found wrong" if ended.status else "done", text=part.read(work))
            status = "took too long" if ended.status is None else "failed"
            return record._replace(status=status, reason=ended.reason, text=last_lines(work))

    def _not_there(self, part: Part) -> Record:
        return self._record(part)._replace(status="not there", reason=part.missing)

    def _record(self, part: Part) -> Record:
        today = datetime.date.today().isoformat()
        return Record(self._machine, part.name, "done", "", "", part.shown(), self._commit, today)


def write_page(out: Path) -> None:
    """Write the page of the records in a folder."""
    text = page(read(out / "gpu.json"))
    write_atomically(out / "gpu.md", lambda file: file.write(text))
