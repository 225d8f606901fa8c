"""The result of `find_fp32_modules`: the rules, and the distance from fp32 with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self, final

from lightning_amp._text import percent, rounded
from lightning_amp.casting import Rule


@final
class Fp32Rules(tuple[Rule, ...]):
    """Rules for `fp32_modules=`: a tuple with attributes about their cost and effect.

    Attributes:
        cost: Time of forward and backward with the rules, over the time without them: 1.08 is 8 % slower. 1.0 if there
            are no rules; NaN if a step does not run without them.
        message: The result in one or two sentences.
        tried: Number of sets of modules that were evaluated.
        gradient_errors: Relative error of the gradient without and with the rules, on the batches of the search.
            Infinite if a value was not finite.
        metric_errors: The same for each validation metric.

    """

    cost: float
    message: str
    tried: int
    gradient_errors: tuple[float, float]
    metric_errors: Mapping[str, tuple[float, float]]

    def __new__(cls, rules: Iterable[Rule], **attributes: Any) -> Self:
        """Make the tuple and set its attributes."""
        made = super().__new__(cls, rules)
        vars(made).update(attributes)
        return made


class NothingHelps(ValueError):  # noqa: N818 - a result, not a fault
    """No set of modules in fp32 is enough, or fp32 itself is not finite."""


@final
@dataclass(frozen=True)
class Distance:
    """Relative errors against fp32; infinite if a value is not finite or the step failed.

    Attributes:
        gradient: Norm of the difference over the norm in fp32, over all parameters, on the worst batch.
        metrics: The error of each validation metric.
        why: The reason in words if the error of the gradient is infinite.

    """

    gradient: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def within(self, tolerance: float) -> bool:
        """Return whether no error is larger."""
        return all(error <= tolerance for error in (self.gradient, *self.metrics.values()))

    def __str__(self) -> str:
        """Write the errors: `gradients differ by 12 % and val_loss differs by 3.4 %`."""
        finite = math.isfinite(self.gradient)
        text = f"gradients differ by {as_percent(self.gradient)}" if finite else self.why
        if not self.metrics:
            return text
        name, error = max(self.metrics.items(), key=lambda item: item[1])
        differs = f"differs by {as_percent(error)}" if math.isfinite(error) else "is not finite"
        return f"{text} and `{name}` {differs}"


def as_percent(error: float) -> str:
    """Write a relative error: `0.12 %`, `340 %`."""
    return percent(error) if error < 1 else f"{rounded(100 * error)} %"
