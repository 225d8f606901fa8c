"""What is compared: the arms, the seeds, the margins. Names and texts only, so that it is a part of a JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from typing_extensions import final

from lightning_amp.comparison._arm_run import number, plain

CONTROL = "control"
"""The label of the arm that is the reference with initial weights moved in their last bit."""


@final
class Margin(NamedTuple):
    """What a precision may cost in one metric, in its own unit; `direction` (`"min"`, `"max"`) if the user gave it."""

    value: float
    direction: str | None = None


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
        """Iterate over label and seed in the order in which they run: all arms of a seed, then the next seed."""
        return ((label, seed) for seed in self.seeds for label in self.labels)

    def to_data(self) -> dict[str, Any]:
        """Return what :func:`json.dumps` takes."""
        return plain(asdict(self))

    @classmethod
    def from_data(cls, data: object) -> Plan:
        """Read what :meth:`to_data` returned.

        Raises:
            ValueError: If it is something else.

        """
        names = [f.name for f in fields(cls)]
        if not isinstance(data, Mapping) or not set(names) <= data.keys():
            raise ValueError(f"A plan has the keys {names}; got {type(data).__name__} {str(data)[:80]!r}.")
        found: dict[str, Any] = {name: data[name] for name in names}
        try:
            margins = {name: Margin(number(value), direction) for name, (value, direction) in found["margins"].items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"This is not the plan of a comparison: {error}.") from error
        return cls(**{name: value for name, value in found.items() if name != "margins"}, margins=margins)
