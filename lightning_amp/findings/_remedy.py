"""Settings that were tried against a fault."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import final


@final
@dataclass(frozen=True, slots=True)
class TriedRemedy:
    """A setting that was tried in a replay of the step that shows the fault.

    Attributes:
        setting: The setting as code: `fp32_modules=['rotary']`.
        value: The metric on that batch, or the SQNR of the gradient in dB. NaN if the replay failed or overflowed.
        works: Whether the difference to fp32 is gone, for a metric at least three quarters of it.

    """

    setting: str
    value: float
    works: bool
