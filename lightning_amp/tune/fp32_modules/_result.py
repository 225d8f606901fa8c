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

    def __new__(
        cls,
        rules: Iterable[Rule],
        *,
        cost: float,
        message: str,
        tried: int,
        gradient_errors: tuple[float, float],
        metric_errors: Mapping[str, tuple[float, float]],
    ) -> Self:
        """Make the tuple and set its attributes."""
        made = super().__new__(cls, rules)
        vars(made).update(
            cost=cost,
            message=message,
            tried=tried,
            gradient_errors=gradient_errors,
            metric_errors=dict(metric_errors),
        )
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"`{name}` cannot be set: a result does not change")

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the attributes to copies and pickles."""
        return (tuple(self),), dict(vars(self))

    def __getstate__(self) -> None:
        """Return nothing: `__getnewargs_ex__` has the attributes already."""


class NothingHelps(ValueError):  # noqa: N818 - a result, not a fault
    """No set of modules in fp32 is enough, or fp32 itself is not finite."""


@final
@dataclass(frozen=True)
class DistanceToFp32:
    """Relative errors against fp32; infinite if a value is not finite or the step failed.

    Attributes:
        gradient: Norm of the difference over the norm in fp32, over all parameters, on the worst batch.
        metrics: The error of each validation metric.
        reason: The reason in words if the error of the gradient is infinite.

    """

    gradient: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def within(self, tolerance: float) -> bool:
        """Return whether no error is larger."""
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
    """Return the difference over the reference, or the difference itself if the reference is 0."""
    if not math.isfinite(value):
        return math.inf
    difference = abs(value - reference)
    return difference / abs(reference) if reference else difference
