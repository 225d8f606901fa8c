"""The record of one claim on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import final

from benchmarks._machine import Machine
from benchmarks._records import read_lines, write_lines
from benchmarks.claims._claim import Verdict


@final
class Record(NamedTuple):
    """A claim that ran.

    Attributes:
        machine: The machine.
        device_type: `"cpu"` or `"cuda"`.
        name: The name of the claim.
        verdict: The verdict.
        figure: Its figure; the error if the run failed.
        details: More figures; may be empty.
        date: The day.
        wall_s: Seconds that it took. A run that several claims need counts for the first of them.
    """

    machine: Machine
    device_type: str
    name: str
    verdict: Verdict
    figure: str
    details: str
    date: str
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return its fields for JSON."""
        return {**self._asdict(), "machine": self.machine._asdict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Read what :meth:`as_dict` returned."""
        machine = Machine(**data.pop("machine"))
        return cls(machine._replace(versions=tuple(machine.versions)), **data)


def read(path: Path) -> list[Record]:
    """Return the records of a file; see `read_lines`."""
    return read_lines(path, Record.from_dict)


def write(path: Path, record: Record) -> None:
    """Add a record to a file; one of the same claim on the same machine is replaced."""
    records = [r for r in read(path) if (r.machine, r.name) != (record.machine, record.name)]
    write_lines(path, [r.as_dict() for r in [*records, record]])
