"""The plan of a comparison: its arms, seeds and margins, as names and texts that fit into a JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from typing_extensions import final

from lightning_amp._plain_data import plain
from lightning_amp.compare import _fields
from lightning_amp.compare._statistics import Direction

MeasureSpeed = Literal["as run", "alone", False]
"""How speed is measured: in the runs themselves, in short runs alone on one device, or not at all."""

CONTROL = "control"
"""The label of the control: the reference, trained with initial weights moved in their last bit."""


@final
class Margin(NamedTuple):
    """The cost that a precision may have in one metric, in the metric's own unit.

    `direction` is `"min"` or `"max"` if the user gave it.
    """

    value: float
    direction: Direction | None = None


@final
@dataclass(frozen=True)
class Plan:
    """A comparison before anything has run.

    Attributes:
        make_module: Name of the factory, as a person would write it: `Net`, `make_net`, `Net(width=64)`.
        make_data: Name of the other factory.
        arms: The plugin of each label: `{"fp16, small scale": "AmpPrecision('fp16', scaler=256.0)"}`. The first arm is
            the reference; the control is not among them.
        trainer_kwargs: Each argument of the Trainer as a text.
        seed: The first seed.
        num_seeds: Number of seeds.
        control: Whether there is a control.
        margins: By metric.
        measure_speed: How speed is measured; `"off"`: not at all.

    """

    make_module: str
    make_data: str
    arms: Mapping[str, str]
    trainer_kwargs: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    num_seeds: int = 1
    control: bool = False
    margins: Mapping[str, Margin] = field(default_factory=dict)
    measure_speed: Literal["as run", "alone", "off"] = "as run"

    @property
    def reference(self) -> str:
        """Return the label of the first arm."""
        return next(iter(self.arms))

    @property
    def labels(self) -> list[str]:
        """Return all labels, the control last."""
        return [*self.arms, CONTROL] if self.control else list(self.arms)

    @property
    def seeds(self) -> range:
        """Return the seeds of each arm."""
        return range(self.seed, self.seed + self.num_seeds)

    @property
    def num_runs(self) -> int:
        """Return the number of runs of all arms together."""
        return len(self.labels) * self.num_seeds

    def runs(self) -> Iterator[tuple[str, int]]:
        """Iterate over label and seed in the order in which they run: all arms of a seed, then the next seed.

        Every second seed runs its arms in reverse order. So a machine that becomes slower does not always slow down the
        same arm.
        """
        for index, seed in enumerate(self.seeds):
            yield from ((label, seed) for label in self.labels[:: -1 if index % 2 else 1])

    def to_data(self) -> dict[str, Any]:
        """Return data for :func:`json.dumps`."""
        return plain(asdict(self))

    @classmethod
    def from_data(cls, data: object) -> Plan:
        """Read data that :meth:`to_data` returned.

        Raises:
            ValueError: If the data is something else.

        """
        plan = _fields.read(cls, data, "the plan of a comparison")
        rules = {
            "arms": (bool(plan.arms) and CONTROL not in plan.arms, f"one arm or more, none called {CONTROL!r}"),
            "num_seeds": (plan.num_seeds >= 1, "1 or more"),
            "margins": (all(0 <= m.value < math.inf for m in plan.margins.values()), "finite numbers of 0 or more"),
        }
        for name, (fits, rule) in rules.items():
            if not fits:
                raise ValueError(f"this is not the plan of a comparison: its `{name}`: must be {rule}")
        return plan
