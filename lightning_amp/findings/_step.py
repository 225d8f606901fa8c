"""The record of one attempted optimizer step, and functions that find the fallbacks in the records of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def fallbacks(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Return the first step in each precision that a fallback has reached."""
    found: list[StepRecord] = []
    before = ""
    for record in records:
        if before and record.precision and record.precision != before:
            found.append(record)
        before = record.precision or before
    return found


def before_fallback(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps before the first fallback, after which there is no loss scale."""
    later = fallbacks(records)
    return records[: records.index(later[0])] if later else records


def describe_fallbacks(records: Iterable[StepRecord]) -> str:
    """Return the fallbacks as the end of a sentence: `, bf16 from step 64 on`; empty if there are none."""
    return "".join(f", {record.precision} from step {record.index:,} on" for record in fallbacks(records))
