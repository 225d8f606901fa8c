"""Read entries of a checkpoint, and refuse a missing or wrong one by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from typing_extensions import final

from lightning_amp._arguments import is_count, is_number
from lightning_amp._compat import _torch
from lightning_amp._text import literal
from lightning_amp.findings import StepPrecision, StepReason, StepRecord

Row = TypeVar("Row")

_ADVICE = (
    "The checkpoint is damaged, or was not written by this package: resume from an earlier one, or delete the entry"
    " from it to start afresh."
)


@final
class Saved:
    """A dictionary from a checkpoint, called `name` in errors. Each method checks the value that it returns."""

    def __init__(self, values: Any, name: str) -> None:
        self.name = name
        if not isinstance(values, Mapping):
            raise _wrong(name, "a dictionary", values)
        self.values: Mapping[Any, Any] = values

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def any(self, key: str) -> Any:
        """Return the value of an entry, unchecked."""
        if key not in self.values:
            raise ValueError(f"The saved state has no entry `{self.name}.{key}`. {_ADVICE}")
        return self.values[key]

    def take(self, key: str, rule: str, fits: Callable[[Any], bool]) -> Any:
        """Return the value of an entry if it `fits`; `rule` says in the error what it must be."""
        value = self.any(key)
        if not fits(value):
            raise self.wrong(key, rule)
        return value

    def number(self, key: str, *, above: float = -math.inf) -> float:
        """Return a finite number."""
        rule = "a finite number" + (f" above {above:g}" if above > -math.inf else "")
        return float(self.take(key, rule, lambda value: is_number(value) and value > above))

    def count(self, key: str, *, least: int = 0) -> int:
        """Return a whole number."""
        return self.take(key, f"a whole number of {least} or more", lambda value: is_count(value, least))

    def entries(self, key: str) -> list[Any]:
        """Return a list."""
        return list(self.take(key, "a list", lambda value: isinstance(value, (list, tuple))))

    def rows(self, key: str, kind: type[Row]) -> list[Row]:
        """Return a list of named tuples."""
        try:
            return [kind(*entry) for entry in self.entries(key)]
        except TypeError as error:
            raise self.wrong(key, f"a list of rows of {len(vars(kind)['_fields'])} values") from error

    def record(self, key: str) -> StepRecord | None:
        """Return a step, or `None`."""
        value = self.take(key, "the fields of a step, or none", lambda value: value is None or _is_step(value))
        return None if value is None else StepRecord(*value)

    def wrong(self, key: str, rule: str) -> ValueError:
        """Return the error for an entry that breaks its rule."""
        return _wrong(f"{self.name}.{key}", rule, self.any(key))


def _is_step(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) not in (6, 7):
        return False
    index, optimizer, scale, following, skipped, reason, precision = [*value, ""][:7]  # an older one has six
    whole, numbers = is_count(index, 0) and is_count(optimizer, 0), is_number(scale) and is_number(following)
    words = reason in get_args(StepReason) and precision in get_args(StepPrecision)
    return whole and numbers and isinstance(skipped, bool) and words


def _wrong(name: str, rule: str, value: Any) -> ValueError:
    return ValueError(f"The saved state's entry `{name}` must be {rule}, got {literal(value)}. {_ADVICE}")


def check_scaler_state(values: Any, name: str) -> None:
    """Raise `ValueError` unless a scaler can continue from this `state_dict()`, of a stock `GradScaler` or of ours."""
    state = Saved(values, name)
    for key in ("scale", "growth_factor", "backoff_factor"):
        state.number(key, above=0.0)
    state.count("growth_interval", least=1)
    state.count(_torch.GROWTH_TRACKER)
    for key in {"min_scale", "max_scale"}.intersection(state.values):
        state.number(key, above=0.0)
    for key in {"hysteresis", "max_consecutive_skips"}.intersection(state.values):
        state.count(key, least=1)
    if "_hysteresis_tracker" in state:
        state.take("_hysteresis_tracker", "a whole number", lambda value: isinstance(value, int))
