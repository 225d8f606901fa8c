"""How far a run in low precision is from one in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import final

from lightning_amp._text import percent, rounded


class NothingHelps(ValueError):  # noqa: N818 - says it better
    """No set of modules in fp32 is enough, or fp32 itself is not finite."""


@final
@dataclass(frozen=True)
class Errors:
    """Relative errors against fp32, infinite where something is not finite or failed.

    Attributes:
        gradient: Norm of the difference over the norm in fp32, over all parameters; of the worst batch.
        metrics: By validation metric.
        reason: Why the gradient's is infinite, in words.

    """

    gradient: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def within(self, tolerance: float) -> bool:
        """Return whether none is larger."""
        return all(error <= tolerance for error in (self.gradient, *self.metrics.values()))

    def describe(self, tolerance: float | None = None) -> str:
        """Write the errors, or only those beyond a tolerance: `gradients differ by 12 %, val_loss by 3.4 %`."""
        parts: list[str] = []
        if tolerance is None or self.gradient > tolerance:
            finite = math.isfinite(self.gradient)
            parts.append(f"gradients differ by {as_percent(self.gradient)}" if finite else self.reason)
        worst = max(self.metrics.items(), key=lambda item: item[1], default=("", 0.0))
        if worst[0] and (tolerance is None or worst[1] > tolerance):
            finite = math.isfinite(worst[1])
            parts.append(f"`{worst[0]}` {f'differs by {as_percent(worst[1])}' if finite else 'is not finite'}")
        return " and ".join(parts)


def as_percent(error: float) -> str:
    """Write a relative error: `0.12 %`, `340 %`."""
    return percent(error) if error < 1 else f"{rounded(100 * error)} %"


def relative_error(value: float, reference: float) -> float:
    """Return how far a value is from a finite reference; where that is 0, the difference itself."""
    if not math.isfinite(value):
        return math.inf
    difference = abs(value - reference)
    return difference / abs(reference) if reference else difference
