"""The file of records: JSON with one record a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import final

from benchmarks._machine import Machine
from benchmarks._records import read_lines, write_lines
from benchmarks.headline._plan import Run

STATUSES = ("measured", "not measured", "does not fit", "cannot", "took too long", "failed")
FINAL = ("measured", "does not fit", "cannot")
"""Outcomes that a second try would not change."""


@final
class Outcome(NamedTuple):
    """The outcome of a run.

    Attributes:
        status: One of :data:`STATUSES`.
        reason: Why it was not measured. A run with skipped steps, or with a loss that is not finite, is "not measured":
            its time is not the time of training.
        samples_per_s: The median over the timed steps, and their middle half, from and to.
        num_steps: Number of timed steps.
        memory: Bytes: `weights`, `gradients`, `states` and `peak`.
        memory_of: `"device"`: what the allocator gave out; `"tensors"`: what tensors held, on a CPU.
        flops: FLOPs of the products of a step.
        mfu: The used share of the device's peak FLOPs; `None` if unknown.
        waits: Waits of the host for the device, per step; `None` if unknown.
        loss: The loss of the last step.
        num_parameters: Of the model.
        source: The library that has the model.
        wall_s: Seconds of the process.

    """

    status: str
    reason: str = ""
    samples_per_s: tuple[float, float, float] | None = None
    num_steps: int = 0
    memory: Mapping[str, int] = {}
    memory_of: str = ""
    flops: int = 0
    mfu: float | None = None
    waits: float | None = None
    loss: float | None = None
    num_parameters: int = 0
    source: str = ""
    wall_s: float = 0.0

    @property
    def speed(self) -> float | None:
        """Return the median of samples per second; `None` if it was not measured."""
        return None if self.samples_per_s is None else self.samples_per_s[0]

    @property
    def activations(self) -> int | None:
        """Return the peak less weights, gradients and states: activations, and copies in half precision."""
        if "peak" not in self.memory:
            return None
        return self.memory["peak"] - sum(self.memory[part] for part in ("weights", "gradients", "states"))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields without defaults."""
        defaults = self._field_defaults
        return {
            name: value for name, value in self._asdict().items() if name not in defaults or value != defaults[name]
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Make an outcome from the result of :meth:`as_dict`."""
        fields = dict(data)
        if fields.get("samples_per_s") is not None:
            fields["samples_per_s"] = tuple(fields["samples_per_s"])
        return cls(**fields)


@final
class Record(NamedTuple):
    """A finished run.

    Attributes:
        machine: The machine.
        run: The run.
        outcome: Its outcome.
        date: The day.

    """

    machine: Machine
    run: Run
    outcome: Outcome
    date: str

    def as_dict(self) -> dict[str, Any]:
        """Return its fields for JSON."""
        return {"date": self.date, **self.machine._asdict(), **self.run._asdict(), **self.outcome.as_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Make a record from the result of :meth:`as_dict`."""
        machine = Machine(data.pop("device"), tuple(data.pop("versions")), data.pop("tiny"))
        run = Run(**{name: data.pop(name) for name in Run._fields})
        date = data.pop("date")
        return cls(machine, run, Outcome.from_dict(data), date)


def read(path: Path) -> list[Record]:
    """Return the records of a file; see :func:`read_lines`."""
    return read_lines(path, Record.from_dict)


def write(path: Path, records: Sequence[Record]) -> None:
    """Write a file of records atomically."""
    write_lines(path, [record.as_dict() for record in records])


def append(path: Path, record: Record) -> None:
    """Add a record to a file, in the place of an earlier one of the same run on the same machine."""
    others = [r for r in read(path) if (r.machine, r.run) != (record.machine, record.run)]
    write(path, [*others, record])
