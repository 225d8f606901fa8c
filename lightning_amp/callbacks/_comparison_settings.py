"""The settings of `MetricComparison`: checked once, at construction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_every_n_epochs(value: int) -> int:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(cast(object, value), int) or value < 1:
        raise ValueError(
            f"`every_n_epochs` must be an integer of at least 1, got {value!r}. Use 1 to compare every time"
        )
    return value


def checked_limit(value: int | float | None) -> int | float | None:
    """A number or a share of batches."""
    fine = value is None or (_is_number(value) and (value >= 1 if isinstance(value, int) else 0.0 < value <= 1.0))
    if not fine:
        raise ValueError(
            "`limit_batches` must be an integer of at least 1 (batches), a float in (0, 1] (share of the batches) or"
            f" `None`, got {value!r}. Leave it out to compare over all batches"
        )
    return value


def checked_tolerance(value: float | Mapping[str, float] | None) -> float | Mapping[str, float] | None:
    """One number of at least 0, or one per metric."""
    if value is None:
        return None
    numbers = dict(value) if isinstance(value, Mapping) else {"": value}
    if not all(isinstance(cast(object, k), str) and _is_number(v) and v >= 0 for k, v in numbers.items()):
        raise ValueError(
            "`tolerance` must be a number of at least 0, or a mapping from metric names to such numbers, or `None`,"
            f" got {value!r}. It is absolute, in the unit of the metric"
        )
    return dict(value) if isinstance(value, Mapping) else value


def checked_on_exceed(value: Literal["warn", "raise"]) -> Literal["warn", "raise"]:
    """What to do when the tolerance is exceeded."""
    if value not in ("warn", "raise"):
        raise ValueError(f'`on_exceed` must be "warn" or "raise", got {value!r}. "warn" lets training go on')
    return value
