"""Records of sampled gradients: a row for each module or parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import final

TOTAL = "(all)"
"""Name of the row of all gradients together."""

_LOW_DB = 10.0
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

    @property
    def rounds_to_zero(self) -> bool:
        """Return whether fp16 loses more than a tenth of the values, because they are too small for it."""
        return self.precision in ("fp16", "") and self.underflow_fraction > 0.1

    @property
    def keeps_three_bits(self) -> bool:
        """Return whether at least three bits are right; in fp8, where healthy gradients keep fewer, whether any is."""
        return self.sqnr_db >= (0 if self.precision == "fp8" else 18)

    @property
    def is_too_short(self) -> bool:
        """Return whether the gradient is shorter than its direction explains, by the loss scale at most."""
        return self.cosine > 0.5 and 0.98 / self.scale < self.norm_ratio < 0.7 * self.cosine


LOST_DB = 3.0
"""A module below this SQNR is a fault, even if all other modules are fine."""
_NEGLIGIBLE = 2.0**-64  # of the largest gradient: no optimizer moves a weight by it
_ROUNDING_DB = -30.0  # below this the fp32 gradient is rounding noise, as for a bias before a normalisation


@final
class GradientSample(NamedTuple):
    """The results of one sampled step.

    Attributes:
        rows: The rows of the table; the last row is about all gradients.
        order: Names of the rows in the order of the backward.
        forward_is_finite: Whether the loss was finite in mixed precision, or not finite in fp32 either.
        fp32_loss_is_finite: Whether the loss was finite in fp32.
        may_clip: Whether `training_step` (in manual optimization) or `on_after_backward` may change the gradients.

    """

    rows: list[GradientRow]
    order: Sequence[str] = ()
    forward_is_finite: bool = True
    fp32_loss_is_finite: bool = True
    may_clip: bool = True

    def bad(self) -> list[GradientRow]:
        """Return the rows that mixed precision loses, in the order of the backward.

        If fp32 is not finite either, return the rows that are not finite.
        """
        *parts, total = self.rows
        place = {name: i for i, name in enumerate(self.order)}
        parts = sorted((row for row in parts if row.largest), key=lambda row: place.get(row.name, len(place)))
        if not math.isfinite(total.largest):
            return [row for row in parts if not math.isfinite(row.largest)] or [total]
        if math.isnan(total.sqnr_db):
            return [row for row in parts if math.isnan(row.sqnr_db)] or [total]
        whole = total.sqnr_db < _LOW_DB and total.largest > 0
        parts = [row for row in parts if row.largest > _NEGLIGIBLE * total.largest]
        lost = [row for row in parts if _ROUNDING_DB < row.sqnr_db < (_LOW_DB if whole else LOST_DB)]
        lost = lost or [row for row in parts if row.rounds_to_zero and row.sqnr_db < _LOW_DB]
        return lost or [total] * whole

    @property
    def too_short(self) -> GradientRow | None:
        """Return the row of all gradients if it is too short, or the first lost row if each lost row is too short."""
        bad = [self.rows[-1]] if self.rows[-1].is_too_short else self.bad()
        return bad[0] if bad and self.may_clip and all(row.is_too_short for row in bad) else None
