"""The record of one part: its result and its circumstances."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from typing_extensions import final

from benchmarks._machine import Machine
from benchmarks._records import read_lines, write_lines

Status = Literal["done", "found wrong", "failed", "took too long", "not there"]
"""`"found wrong"`: the part has a result, which is a fault, such as a failed test."""


@final
class Record(NamedTuple):
    """A part that ran, or that could not run.

    Attributes:
        machine: The machine.
        part: Its name.
        status: The outcome.
        reason: Why it has no result; empty if it has one.
        text: Its section of the page, in Markdown.
        command: As a person types it.
        commit: The commit of the checkout.
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

    def as_dict(self) -> dict[str, Any]:
        """Return its fields for JSON."""
        return {**self._asdict(), "machine": self.machine._asdict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Read what :meth:`as_dict` returned."""
        machine = Machine(**data.pop("machine"))
        return cls(machine._replace(versions=tuple(machine.versions)), **data)


def read(path: Path) -> list[Record]:
    """Return the records of a file; see :func:`read_lines`."""
    return read_lines(path, Record.from_dict)


def append(path: Path, record: Record) -> None:
    """Add a record to a file; one of the same part on the same machine is replaced."""
    records = [r for r in read(path) if (r.machine, r.part) != (record.machine, record.part)]
    write_lines(path, [r.as_dict() for r in [*records, record]])
