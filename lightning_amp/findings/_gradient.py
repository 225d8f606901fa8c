"""What a sample of gradients found: a row for each module or parameter, and what is wrong with a gradient."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from typing_extensions import final

TOTAL = "(all)"
"""Name of the row of all gradients together."""

LOW_DB = 10.0
"""Below it the noise is a third of the gradient. Deep healthy networks have 20 in bf16, fp8 has 18."""


@final
class GradientRow(NamedTuple):
    """One module, or parameter, at one step.

    Attributes:
        step: `trainer.global_step` before the sampled step.
        name: Qualified name; `"(all)"` for all gradients together.
        scale: The loss scale that the shares and the headroom are meant for.
        num_values: How many gradients are not zero.
        underflow_fraction: Share of these that becomes zero in fp16.
        subnormal_fraction: Share of these that loses bits.
        headroom_bits: How often the scale could be doubled before the largest leaves fp16.
        sqnr_db: Of the mixed-precision gradient against fp32; NaN if it overflowed.
        cosine: Between the two; NaN if it overflowed.
        largest: Largest magnitude, unscaled.
        fp8_underflow_fraction: In fp8, share of the non-zero gradients reaching the layer that its cast to 8 bits makes
            zero; `None` for what does not run in fp8.
        fp8_saturated_fraction: Share that is cut to the largest number of the format; `None` likewise.
        norm_ratio: Norm of the mixed-precision gradient, in units of that of fp32; NaN if one overflowed.
        precision: That the step ran in: `"fp16"`, `"bf16"`, `"fp8"` or `"fp32"`; empty where it is not known.
    """

    step: int
    name: str
    scale: float
    num_values: int
    underflow_fraction: float
    subnormal_fraction: float
    headroom_bits: float
    sqnr_db: float
    cosine: float
    largest: float
    fp8_underflow_fraction: float | None = None
    fp8_saturated_fraction: float | None = None
    norm_ratio: float = math.nan
    precision: str = ""


GradientFaultKind = Literal["nan", "infinite", "overflow", "zero", "length", "rounding"]


@final
class GradientFault(NamedTuple):
    """What is wrong with a gradient.

    Attributes:
        kind: `"nan"` and `"infinite"`: in fp32, too. `"overflow"`: in mixed precision alone. `"zero"`: it is too small
            for fp16. `"length"`: it points the same way. `"rounding"`: it does not, and all of it is in range.
        row: The first in the order of the backward.
        total: All gradients together.
        whole: Whether all of them together are far off, or only some modules' own.
        clipped: Who clips gradients that are still multiplied with the loss scale, and where; empty if nobody does.

    """

    kind: GradientFaultKind
    row: GradientRow
    total: GradientRow
    whole: bool
    clipped: str = ""

    @property
    def cause(self) -> tuple[str, str, float]:
        """Return what two samples have in common that the same setting helps."""
        return self.kind, self.row.name, self.total.scale if self.kind in ("zero", "overflow") else 1.0


@final
class InaccurateDerivative(NamedTuple):
    """A derivative inside of the loss that fp16 does not hold.

    Attributes:
        line: Where the step asks for it.
        zero: Share of its non-zero values that is zero in fp16.
        sqnr_db: Against that of fp32; NaN if it overflowed.

    """

    line: str
    zero: float
    sqnr_db: float
