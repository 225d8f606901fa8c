"""The settings of `MetricComparison`: checked once, at construction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_amp._arguments import is_count, is_number, require, require_choice


def check_settings(every_n_epochs: object, limit_batches: object, tolerance: object, on_exceed: object) -> None:
    """Refuse what `MetricComparison` cannot do.

    Raises:
        ValueError: Naming the argument.

    """
    fine = is_count(every_n_epochs)
    require(fine, "every_n_epochs", "an integer of at least 1", every_n_epochs, "Use 1 to compare every time.")
    share = isinstance(limit_batches, float) and 0.0 < limit_batches <= 1.0
    rule = "an integer of at least 1 (batches), a float in (0, 1] (share of the batches) or `None`"
    advice = "Leave it out to compare over all batches."
    require(limit_batches is None or is_count(limit_batches) or share, "limit_batches", rule, limit_batches, advice)
    numbers: Any = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"": tolerance}
    fine = all(isinstance(k, str) and is_number(v, finite=False) and v >= 0 for k, v in numbers.items())
    rule = "a number of at least 0, a mapping from metric names to such numbers or `None`"
    require(fine, "tolerance", rule, tolerance, "It is absolute, in the unit of the metric.")
    require_choice("on_exceed", on_exceed, ("warn", "raise"), '"warn" lets training go on.')
