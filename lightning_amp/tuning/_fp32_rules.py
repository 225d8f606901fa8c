"""What `find_fp32_modules` returns: the rules, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import Self, final

from lightning_amp.casting import Rule


@final
class Fp32Rules(tuple[Rule, ...]):
    """Rules for `fp32_modules=`; a tuple that also knows what they cost and what they are good for.

    Attributes:
        cost: Time of a training step, forward and backward, with the rules against without: 1.08 is 8 % slower;
            NaN if a step does not run without them.
            1.0 if there are none.
        message: What was found, in one or two sentences.
        tried: How many sets of modules were evaluated.
        gradient_errors: Relative error of the gradient without and with the rules, on the batches of the search.
            Infinite if a value was not finite.
        metric_errors: The same by validation metric.

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
        """Make one."""
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
        raise AttributeError(f"`{name}` cannot be set: what was found does not change")

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let a copy and a pickle have all of it."""
        return (tuple(self),), dict(vars(self))

    def __getstate__(self) -> None:
        """Keep nothing else."""
