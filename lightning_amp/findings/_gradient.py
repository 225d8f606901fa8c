"""Records of sampled gradients: a row for each module or parameter, and the faults found in them."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from typing_extensions import final

TOTAL = "(all)"
"""Name of the row of all gradients together."""

LOW_DB = 10.0
"""Below this SQNR, noise is more than a third of the gradient. Healthy deep networks have 20 dB in bf16, 18 in fp8."""


@final
class GradientRow(NamedTuple):
    """The sampled gradients of one module or parameter at one step.

    Attributes:
        step: `trainer.global_step` before the sampled step.
        name: Qualified name; `"(all)"` for all gradients together.
        scale: The loss scale for which the fractions and the headroom hold.
        num_values: Number of non-zero gradients.
        underflow_fraction: Share of them that becomes zero in fp16.
        subnormal_fraction: Share of them that becomes subnormal in fp16 and loses bits.
        headroom_bits: How often the scale could be doubled before the largest leaves fp16.
        sqnr_db: SQNR of the mixed-precision gradient against fp32; NaN if it overflowed.
        cosine: Cosine between the two gradients; NaN if it overflowed.
        largest: Largest magnitude, unscaled.
        norm_ratio: Norm of the mixed-precision gradient over the norm of the fp32 gradient; NaN if one overflowed.
        precision: The precision of the step: `"fp16"`, `"bf16"`, `"fp8"` or `"fp32"`; empty if it is not known.
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
    norm_ratio: float = math.nan
    precision: str = ""


GradientFaultKind = Literal["nan", "infinite", "overflow", "zero", "length", "rounding"]


@final
class GradientFault(NamedTuple):
    """A fault of a gradient.

    Attributes:
        kind: `"nan"` and `"infinite"`: not finite in fp32 either. `"overflow"`: not finite in mixed precision only.
            `"zero"`: too small for fp16, so it becomes zero. `"length"`: the right direction with a wrong norm.
            `"rounding"`: in range, but the wrong direction.
        row: The first faulty row in the order of the backward.
        total: All gradients together.
        whole: Whether the gradient as a whole is wrong, rather than the gradients of some modules only.
        clipped: The line that clips gradients before they are unscaled; empty if there is none.

    """

    kind: GradientFaultKind
    row: GradientRow
    total: GradientRow
    whole: bool
    clipped: str = ""

    @property
    def cause(self) -> tuple[str, str, float]:
        """Return a key. Two faults with the same key have the same remedy."""
        return self.kind, self.row.name, self.total.scale if self.kind in ("zero", "overflow") else 1.0


@final
class InaccurateDerivative(NamedTuple):
    """A derivative inside the loss that does not fit into fp16.

    Attributes:
        line: The line of the step that computes it.
        zero: Share of its non-zero values that become zero in fp16.
        sqnr_db: SQNR against the fp32 derivative; NaN if it overflowed.

    """

    line: str
    zero: float
    sqnr_db: float
