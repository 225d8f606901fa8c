"""Remedies that were tried on a skipped step, and settings that were tried against other faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from typing_extensions import final

RemedyKind = Literal[
    "", "bf16", "fp32_modules", "operation in fp32", "operation without autocast", "scale", "divisor", "epsilon",
    "finite mask", "clamp", "zero_infinity", "source in fp32", "logsigmoid",
]  # fmt: skip


@final
class Remedy(NamedTuple):
    """A remedy that was tried on a skipped step, in a replay.

    Attributes:
        kind: Empty: nothing. `"bf16"`: that precision. `"fp32_modules"`: these modules in fp32. `"operation in fp32"`:
            `.float()` on the inputs of the named operation. `"operation without autocast"`: the same, with autocast off
            during the operation. `"source in fp32"`: `.float()` on the inputs of an earlier operation, whose rounded
            result made an argument 0. `"logsigmoid"`: `logsigmoid` instead of the logarithm of a sigmoid. `"scale"`: a
            lower loss scale. `"divisor"`: the loss divided by a constant. `"epsilon"`: an argument kept at least an
            epsilon away from 0.
            `"finite mask"`: the lowest number of the format instead of minus infinity. `"clamp"`: an argument kept
            below a number. `"zero_infinity"`: that option of a CTC loss.
        values: Names of modules, the scale, the divisor, the epsilon, the argument of `logsigmoid` (`"x"` or `"-x"`).
            For an earlier operation: its name and line, then the name and line of the operation that rounds its result.
            All further entries are other lines to which the remedy was applied.
        worked: Whether loss and gradients were finite.

    """

    kind: RemedyKind
    values: tuple[Any, ...] = ()
    worked: bool = False


# Earlier versions pickled it under this name. With it, `safe_globals([Remedy])` also loads their checkpoints.
Remedy.__module__ = "lightning_amp.reports._overflow_report"


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
