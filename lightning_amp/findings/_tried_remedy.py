"""A setting that was tried against a fault, on the step that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import final


@final
@dataclass(frozen=True, slots=True)
class TriedRemedy:
    """A setting that was tried in a replay.

    Attributes:
        setting: As it stands in code: `fp32_modules=['rotary']`.
        value: What came of it: of a metric its value on the batch, of a gradient its SQNR in decibels; NaN if it could
            not be tried, or overflowed.
        works: Whether the difference to fp32 is gone: of a metric by three quarters at least.

    """

    setting: str
    value: float
    works: bool
