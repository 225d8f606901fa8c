"""What was tried on a skipped step."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from typing_extensions import final

RemedyKind = Literal[
    "", "bf16", "fp32_modules", "operation in fp32", "operation without autocast", "scale", "divisor", "epsilon",
    "finite mask", "clamp", "zero_infinity", "source in fp32", "logsigmoid",
]  # fmt: skip


@final
class Remedy(NamedTuple):
    """What was tried on a step that was skipped, in a replay of it.

    Attributes:
        kind: Empty: nothing. `"bf16"`: that precision. `"fp32_modules"`: these modules in fp32. `"operation in fp32"`:
            `.float()` on what goes into the operation that is named; `"operation without autocast"`: and autocast off
            around it. `"source in fp32"`: `.float()` on what goes into an earlier operation, whose rounded result made
            an argument 0. `"logsigmoid"`: `logsigmoid` in the place of the logarithm of a sigmoid. `"scale"`: a lower
            loss scale. `"divisor"`: the loss divided by a constant. `"epsilon"`: what must not be 0 is kept that far
            away from it. `"finite mask"`: the lowest number of the format in the place of minus infinity. `"clamp"`:
            the argument is kept below a number. `"zero_infinity"`: that option of a CTC loss.
        values: Names of modules, the scale, the divisor, the epsilon, what `logsigmoid` takes (`"x"` or `"-x"`), or the
            earlier operation and its line, and the same of the one that loses the digits; then further lines on which
            the same was done.
        worked: Whether loss and gradients were finite.

    """

    kind: RemedyKind
    values: tuple[Any, ...] = ()
    worked: bool = False


# Checkpoints of earlier versions have it pickled under this name, which `safe_globals([Remedy])` then allows.
Remedy.__module__ = "lightning_amp.reports._overflow_report"
