"""Records of a metric comparison: a row for each metric and module."""

from __future__ import annotations

import math
from typing import NamedTuple

from typing_extensions import final

from lightning_amp.findings._lost_precision import ModuleSums
from lightning_amp.numerics import fidelity


@final
class ComparisonRow(NamedTuple):
    """One metric of one compared validation.

    `step` is the step that the loggers got. `diff` is AMP minus fp32, in the metric's own unit. `relative_diff` is
    `diff` over the magnitude of `fp32` (0 if both are 0, infinite if only `fp32` is 0).
    """

    epoch: int
    step: int
    metric: str
    amp: float
    fp32: float
    diff: float
    relative_diff: float

    @classmethod
    def of(cls, epoch: int, step: int, metric: str, amp: float, fp32: float) -> ComparisonRow:
        """Return a row for the two values."""
        # Equal infinities agree, but their difference would be NaN.
        diff = 0.0 if amp == fp32 else amp - fp32
        relative_diff = diff / abs(fp32) if fp32 else diff and diff * math.inf
        return cls(epoch, step, metric, amp, fp32, diff, relative_diff)

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the AMP value and the fp32 value differ by more than `tolerance`.

        A NaN on only one side is a difference.
        """
        if math.isnan(self.amp) or math.isnan(self.fp32):
            return math.isnan(self.amp) != math.isnan(self.fp32)
        return abs(self.diff) > tolerance

    @property
    def is_broken(self) -> bool:
        """Return whether only mixed precision is not finite."""
        return math.isfinite(self.fp32) and not math.isfinite(self.amp)

    @property
    def went_wrong(self) -> bool:
        """Return whether the AMP value is not finite, or differs from the fp32 value by more than a quarter."""
        if not math.isfinite(self.amp) or not math.isfinite(self.fp32):
            return not math.isfinite(self.amp)
        return abs(self.diff) > 0.25 * min(abs(self.amp), abs(self.fp32))


@final
class ModuleRow(NamedTuple):
    """The outputs of one module in one compared validation, all its calls together.

    Attributes:
        epoch: `trainer.current_epoch`.
        step: `trainer.global_step`.
        name: Qualified name of the module.
        kind: Its class.
        num_calls: Number of calls.
        sqnr_db: SQNR of its outputs against fp32; 6 dB are one correct bit. NaN if an output is not finite.
        varying_sqnr_db: SQNR after subtracting the mean over the batch. It shows the bfloat16 error in
            `x + 1000`, a small part of the output but a large part of the difference between samples.
        cosine: Cosine between the outputs of both runs; NaN if an output is not finite.
        rms: Root mean square of the outputs in fp32.
    """

    epoch: int
    step: int
    name: str
    kind: str
    num_calls: int
    sqnr_db: float
    varying_sqnr_db: float
    cosine: float
    rms: float

    @classmethod
    def of(cls, epoch: int, step: int, name: str, sums: ModuleSums) -> ModuleRow:
        """Return a row for all calls of a module. This waits for the device."""
        total = sums.outputs.sum(0)
        (sqnr_db, cosine), (varying_db, _) = fidelity(total[:3]), fidelity(total[3:])
        rms = math.sqrt(float(total[0]) / max(sums.num_values, 1))
        return cls(epoch, step, name, sums.kind, sums.num_calls, float(sqnr_db), float(varying_db), float(cosine), rms)
