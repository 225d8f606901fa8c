"""One attempted optimizer step, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch.optim import Optimizer
from typing_extensions import final

Reason = Literal["none", "loss", "gradient"]
StepPrecision = Literal["", "fp16", "bf16", "fp8", "fp32"]


@final
@dataclass(frozen=True, slots=True)
class StepRecord:
    """One attempted optimizer step. Immutable.

    .. code-block:: python

        plugin = AmpPrecision("fp16")
        L.Trainer(plugins=[plugin], max_epochs=1).fit(model, data)
        print(plugin.last_step)  # StepRecord(index=7, optimizer_idx=0, scale=2048.0, ..., precision='fp16')

    Attributes:
        index: Optimizer steps attempted before this one, over all optimizers of the run.
        optimizer_idx: Which optimizer, in the order of `configure_optimizers`.
        scale: Loss scale used for this step; 1.0 without scaling.
        next_scale: Loss scale after the update that followed, at the end of the batch.
        skipped: Whether the step was dropped.
        reason: `"none"`; `"loss"` if the loss itself was not finite; `"gradient"` if only gradients were.
        precision: What it was taken in: `"fp16"`, `"bf16"`, `"fp8"` or `"fp32"`; empty where an older version saved it.

    """

    index: int
    optimizer_idx: int
    scale: float
    next_scale: float
    skipped: bool
    reason: Reason
    precision: StepPrecision = ""


Listener: TypeAlias = Callable[[list[StepRecord]], None]


@final
class Subscription:
    """Somebody who gets the records of a :class:`~lightning_amp.scaling.RecordLog`, until :meth:`close`.

    Args:
        listener: Gets the records, in blocks.
        everybody: Who is subscribed.
        at_once: Hand over what there is at the end of a batch in which a step was skipped.
        on_bad_loss: Gets the record of each step that was taken although its loss was not finite; `None`: nobody asks.
        before_update: Is told the index of a step and its optimizer, right before the update reads hyperparameters.
        cause: Is asked, for the error of a stuck run, why steps were skipped since the one of this index; returns an
            empty text if it does not know. `None`: it does not look for causes.

    """

    def __init__(
        self,
        listener: Listener,
        everybody: list[Subscription],
        *,
        at_once: bool = False,
        on_bad_loss: Callable[[StepRecord], None] | None = None,
        before_update: Callable[[int, Optimizer], None] | None = None,
        cause: Callable[[int], str] | None = None,
    ) -> None:
        self.listener, self.at_once, self.on_bad_loss = listener, at_once, on_bad_loss
        self.before_update, self.cause = before_update, cause
        self._everybody = everybody
        everybody.append(self)

    @property
    def is_open(self) -> bool:
        """Return whether records still come."""
        return self in self._everybody

    def end_losses(self) -> None:
        """Ask no more for steps that were taken although their loss was not finite."""
        self.on_bad_loss = None

    def close(self) -> None:
        """End it; a second time does nothing."""
        if self.is_open:
            self._everybody.remove(self)
