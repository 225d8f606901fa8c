"""What is on record of one part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

from typing_extensions import final

from benchmarks._machine import Machine
from benchmarks._records import read_lines, write_lines

Status = Literal["done", "found wrong", "failed", "took too long", "not there"]
"""`"found wrong"`: it has a result, which is that something is not as promised, such as a test that failed."""


@final
class Record(NamedTuple):
    """A part that was done, or that could not be.

    Attributes:
        machine: Where.
        part: Its name.
        status: What came of it.
        reason: Why it has no result; empty if it has one.
        text: Its section of the page, Markdown.
        command: As a person types it.
        commit: Of the checkout.
        date: The day.
        wall_s: Seconds that it took.

    """

    machine: Machine
    part: str
    status: Status
    reason: str
    text: str
    command: str
    commit: str
    date: str
    wall_s: float = 0.0

    def as_line(self) -> str:
        """Return it as JSON."""
        return json.dumps({**self._asdict(), "machine": self.machine._asdict()}, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Record:
        """Read it from JSON.

        Raises:
            ValueError: If it is none.

        """
        data = json.loads(line)
        try:
            machine = Machine(**data.pop("machine"))
            return cls(machine._replace(versions=tuple(machine.versions)), **data)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this is no record: {error!r}") from error


def read(path: Path) -> list[Record]:
    """Return the records of a file; see :func:`read_lines`."""
    return read_lines(path, Record.from_line)


def append(path: Path, record: Record) -> None:
    """Add a record to a file; one of the same part on the same machine is replaced."""
    records = [r for r in read(path) if (r.machine, r.part) != (record.machine, record.part)]
    write_lines(path, [r.as_line() for r in [*records, record]])
