"""What is compared: the arms, the seeds, the margins. Names and texts only, so that it is a part of a JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, get_args

from typing_extensions import final

from lightning_amp._plain_data import plain
from lightning_amp.compare import _fields
from lightning_amp.compare._statistics import Direction

CONTROL = "control"
"""The label of the arm that is the reference with initial weights moved in their last bit."""


@final
class Margin(NamedTuple):
    """What a precision may cost in one metric, in its own unit; `direction` (`"min"`, `"max"`) if the user gave it."""

    value: float
    direction: Direction | None = None


@final
@dataclass(frozen=True)
class Plan:
    """A comparison before anything has run.

    Attributes:
        make_module: Qualified name of the factory.
        make_data: Likewise.
        arms: What each label stands for: `{"fp16, small scale": "AmpPrecision('fp16', scaler=256.0)"}`; the first is
            the reference. Without the control.
        trainer_kwargs: Each argument as a text.
        seed: The first one.
        num_seeds: How many.
        control: Whether there is a control.
        margins: By metric.

    """

    make_module: str
    make_data: str
    arms: Mapping[str, str]
    trainer_kwargs: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    num_seeds: int = 1
    control: bool = False
    margins: Mapping[str, Margin] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Return the label of the first arm."""
        return next(iter(self.arms))

    @property
    def labels(self) -> list[str]:
        """Return all labels, that of the control last."""
        return [*self.arms, CONTROL] if self.control else list(self.arms)

    @property
    def seeds(self) -> range:
        """Return the seeds of each arm."""
        return range(self.seed, self.seed + self.num_seeds)

    def runs(self) -> Iterator[tuple[str, int]]:
        """Iterate over label and seed in the order in which they run: all arms of a seed, then the next seed.

        Every second seed runs its arms backwards: a machine that becomes slower or busier does not meet the same arm.
        """
        for index, seed in enumerate(self.seeds):
            yield from ((label, seed) for label in self.labels[:: -1 if index % 2 else 1])

    def to_data(self) -> dict[str, Any]:
        """Return what :func:`json.dumps` takes."""
        return plain(asdict(self))

    @classmethod
    def from_data(cls, data: object) -> Plan:
        """Read what :meth:`to_data` returned.

        Raises:
            ValueError: If it is something else.

        """
        return cls(**_fields.read("the plan of a comparison", _READERS, data))


def _arms(data: Any) -> dict[str, str]:
    found = _fields.by_name(_fields.text)(data)
    if not found or CONTROL in found:
        raise ValueError(f"{list(found)} are no labels of arms: one at least, and none is {CONTROL!r}")
    return found


def _num_seeds(data: Any) -> int:
    if _fields.count(data) < 1:
        raise ValueError(f"{data} is less than 1")
    return data


def _margin(data: Any) -> Margin:
    value, direction = _MARGIN(data)
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not a finite number of 0 or more")
    return Margin(value, direction)


_MARGIN = _fields.row(_fields.number, _fields.optional(_fields.choice(*get_args(Direction))))
_READERS: dict[str, _fields.Reader[Any]] = {
    "make_module": _fields.text,
    "make_data": _fields.text,
    "arms": _arms,
    "trainer_kwargs": _fields.by_name(_fields.text),
    "seed": _fields.count,
    "num_seeds": _num_seeds,
    "control": _fields.boolean,
    "margins": _fields.by_name(_margin),
}
