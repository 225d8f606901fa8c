"""What `MetricComparison` accepts: which metrics `tolerance` names, and what happens beyond it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp.callbacks._comparison_settings import why_not_logged
from lightning_amp.reports import ComparisonTable
from lightning_amp.shadow import Stage


@final
class Tolerance:
    """Holds for one run.

    Args:
        tolerance: As of `MetricComparison`.
        on_exceed: Likewise.

    """

    def __init__(self, tolerance: float | Mapping[str, float] | None, on_exceed: Literal["warn", "raise"]) -> None:
        self._tolerance, self._on_exceed = tolerance, on_exceed
        self._names_checked = False

    def check_names(self, trainer: Trainer, module: LightningModule, logged: AbstractSet[str]) -> None:
        """Refuse names that are not logged, in the sanity check or in the first comparison. All ranks must call.

        Raises:
            ValueError: Naming them.

        """
        if not isinstance(self._tolerance, Mapping) or self._names_checked:
            return
        if not trainer.sanity_checking:
            self._names_checked = True
        stage: Stage = "test" if trainer.testing else "validation"
        error = why_not_logged(self._tolerance, logged, module, stage, sanity=trainer.sanity_checking)
        # A metric that is logged on rank 0 only is unknown to the others.
        if trainer.strategy.reduce_boolean_decision(error is not None, all=True):
            raise ValueError(error)

    def judge(self, trainer: Trainer, table: ComparisonTable) -> None:
        """Say which metrics of the last comparison are beyond it. All ranks must call.

        Raises:
            RuntimeError: On all ranks, with `on_exceed="raise"`.

        """
        if self._tolerance is None:
            return
        where = table.exceeding()
        if not trainer.strategy.reduce_boolean_decision(bool(where), all=False):
            return
        where = where or "on another rank"
        epoch = trainer.current_epoch
        text = f"`MetricComparison`: mixed precision costs more than the tolerance in epoch {epoch}: {where}"
        if self._on_exceed == "raise":
            raise RuntimeError(f"{text}. Keep sensitive modules in fp32, or raise the tolerance")
        _messages.warn(f"{text}.")
