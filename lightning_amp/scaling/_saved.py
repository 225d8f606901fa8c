"""Read entries of a checkpoint, and refuse a wrong one by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from typing_extensions import final

from lightning_amp._arguments import is_count, is_number
from lightning_amp._compat import _torch
from lightning_amp.findings import StepPrecision, StepReason, StepRecord

Row = TypeVar("Row")


@final
class Saved:
    """A dictionary from a checkpoint, called `name` in errors. Each method checks the value that it returns.

    Every `ValueError` names the missing or wrong entry, its rule, and the next step.
    """

    def __init__(self, values: Any, name: str) -> None:
        self.name = name
        if not isinstance(values, Mapping):
            raise wrong(name, "a dictionary", values)
        self._values: Mapping[Any, Any] = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def any(self, key: str) -> Any:
        """Return the value of an entry, unchecked."""
        if key not in self._values:
            raise ValueError(f"The saved state has no entry `{self.name}.{key}`. {_ADVICE}")
        return self._values[key]

    def number(self, key: str, *, above: float = -math.inf, below: float = math.inf) -> float:
        """Return a finite number."""
        value = self.any(key)
        if not is_number(value) or not above < value < below:
            limits = f" above {above:g}" if above > -math.inf else ""
            limits += f"{' and' if limits else ''} below {below:g}" if below < math.inf else ""
            raise self.wrong(key, f"a finite number{limits}")
        return float(value)

    def count(self, key: str, *, least: int = 0) -> int:
        """Return a whole number."""
        value = self.any(key)
        if not is_count(value, least):
            raise self.wrong(key, f"a whole number of {least} or more")
        return value

    def entries(self, key: str) -> list[Any]:
        """Return a list."""
        value = self.any(key)
        if not isinstance(value, (list, tuple)):
            raise self.wrong(key, "a list")
        return list(value)

    def rows(self, key: str, kind: type[Row]) -> list[Row]:
        """Return a list of named tuples."""
        entries = self.entries(key)
        try:
            return [kind(*entry) for entry in entries]
        except TypeError as error:
            fields: tuple[str, ...] = vars(kind)["_fields"]
            raise self.wrong(key, f"a list of rows of {len(fields)} values") from error

    def record_if_any(self, key: str) -> StepRecord | None:
        """Return a step, or `None` if there is no such entry."""
        return self.record(key) if key in self else None

    def record(self, key: str) -> StepRecord | None:
        """Return a step, or `None`."""
        value = self.any(key)
        if value is None:
            return None
        record: StepRecord | None = None
        try:
            record = StepRecord(*value)
            fits = (
                all(isinstance(n, int) and n >= 0 for n in (record.index, record.optimizer_idx))
                and all(is_number(scale) for scale in (record.scale, record.next_scale))
                and isinstance(record.skipped, bool)
                and record.reason in get_args(StepReason)
                and record.precision in get_args(StepPrecision)
            )
        except TypeError:
            fits = False
        if not fits:
            raise self.wrong(key, "the fields of a step, or none")
        return record

    def wrong(self, key: str, rule: str) -> ValueError:
        """Return the error for an entry that breaks its rule."""
        return wrong(f"{self.name}.{key}", rule, self.any(key))


def wrong(name: str, rule: str, value: Any) -> ValueError:
    """Return the error for a saved value that breaks its rule."""
    text = repr(value)
    return ValueError(
        f"The saved state's entry `{name}` must be {rule}, got {text if len(text) < 100 else f'{text[:97]}...'}."
        f" {_ADVICE}"
    )


_ADVICE = (
    "The checkpoint is damaged, or was not written by this package: resume from an earlier one, or delete the entry"
    " from it to start afresh."
)


def check_scaler_state(values: Any, name: str) -> None:
    """Raise `ValueError` unless a scaler can continue from this `state_dict()`, of a stock `GradScaler` or of ours."""
    state = Saved(values, name)
    state.number("scale", above=0.0)
    state.number("growth_factor", above=0.0)
    state.number("backoff_factor", above=0.0)
    state.count("growth_interval", least=1)
    state.count(_torch.GROWTH_TRACKER)
    for key in ("min_scale", "max_scale"):
        if key in state:
            state.number(key, above=0.0)
    for key in ("hysteresis", "max_consecutive_skips"):
        if key in state:
            state.count(key, least=1)
    if "_hysteresis_tracker" in state and not isinstance(state.any("_hysteresis_tracker"), int):
        raise state.wrong("_hysteresis_tracker", "a whole number")
