"""The record of one attempted optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import final

StepReason = Literal["none", "loss", "gradient"]
StepPrecision = Literal["", "fp16", "bf16", "fp8", "fp32"]


@final
@dataclass(frozen=True, slots=True)
class StepRecord:
    """One attempted optimizer step.

    .. code-block:: python

        plugin = AmpPrecision("fp16")
        L.Trainer(plugins=[plugin], max_epochs=1).fit(model, data)
        print(plugin.last_step)  # StepRecord(index=7, optimizer_idx=0, scale=2048.0, ..., precision='fp16')

    Attributes:
        index: Number of optimizer steps attempted before this one, over all optimizers of the run.
        optimizer_idx: Place of the optimizer in `configure_optimizers`.
        scale: Loss scale used for this step; 1.0 without scaling.
        next_scale: Loss scale after the update that followed, at the end of the batch.
        skipped: Whether the step was dropped.
        reason: `"none"`; `"loss"` if the loss itself was not finite; `"gradient"` if only gradients were.
        precision: The precision of the step: `"fp16"`, `"bf16"`, `"fp8"` or `"fp32"`; empty without our plugin.

    """

    index: int
    optimizer_idx: int
    scale: float
    next_scale: float
    skipped: bool
    reason: StepReason
    precision: StepPrecision = ""

    @property
    def applied(self) -> bool:
        """Return whether the optimizer has moved the weights: the opposite of `skipped`."""
        return not self.skipped
