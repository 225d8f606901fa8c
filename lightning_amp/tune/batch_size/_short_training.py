"""Train for some steps, only to measure them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import final, override

from lightning_amp.measure import is_settled
from lightning_amp.shadow import remove_callbacks

_NOT_IN_SHORT_RUNS = (BatchSizeFinder, Checkpoint, EarlyStopping, LearningRateFinder, ModelSummary, ProgressBar, Timer)
"""Callbacks that write files, stop training, or try batch sizes."""

_LEFT_OUT = (
    "barebones",
    "check_val_every_n_epoch",
    "default_root_dir",
    "enable_checkpointing",
    "max_epochs",
    "max_steps",
    "max_time",
    "min_epochs",
    "min_steps",
    "model_registry",
    "overfit_batches",
    "profiler",
    "val_check_interval",
)
"""Arguments of the Trainer that say how long it trains or what it writes; a profiler would replace our own."""

_MANY_EPOCHS, _MANY_STEPS = 1000, 10_000
"""Limits on steps and epochs, too large for any run to reach.

They exist because schedules may read the number of steps.
"""

_MOST_BATCHES = 1000
"""Largest number of batches for a module that takes no optimizer step."""

_LONG_S = 10.0
"""Seconds of steady steps after which two of them are enough."""


def short_trainer(trainer_kwargs: Mapping[str, Any], stop: Callback) -> dict[str, Any]:
    """Return arguments of a Trainer that trains until the callback `stop` ends it, and neither validates nor writes."""
    kwargs = {name: value for name, value in trainer_kwargs.items() if name not in _LEFT_OUT}
    # a share of a few large batches may be less than one batch
    if isinstance(kwargs.get("limit_train_batches"), float):
        del kwargs["limit_train_batches"]
    given = kwargs.pop("callbacks", None) or []
    return {
        **kwargs,
        "callbacks": [*([given] if not isinstance(given, (list, tuple)) else given), stop],
        # Lightning refuses `False` if the callbacks contain a progress bar; `StopWhenMeasured` removes all bars
        "enable_progress_bar": True,
        "limit_val_batches": 0,
        "logger": DummyLogger(),
        "max_epochs": _MANY_EPOCHS,
        "max_steps": max(trainer_kwargs.get("max_steps") or 0, _MANY_STEPS),
        "num_sanity_val_steps": 0,
    }


@final
class StopWhenMeasured(Callback):
    """Ends a training after enough steady steps.

    Args:
        least_batches: Number of steady batches.
        least_s: Seconds that they take at least.
        most_batches: Number of steady batches after which the time does not count.

    """

    def __init__(self, least_batches: int, least_s: float, most_batches: int) -> None:
        self._least_batches, self._least_s, self._most_batches = least_batches, least_s, most_batches
        self._settled_at: tuple[int, float] | None = None
        self.num_batches = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        remove_callbacks(trainer, _NOT_IN_SHORT_RUNS)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # the schedule may monitor a metric of validation, which does not run

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.num_batches += 1
        count, now = self.num_batches, time.monotonic()
        skipped = getattr(trainer.precision_plugin, "num_skipped", 0)
        if self._settled_at is None and is_settled(count, trainer.global_step, skipped):
            self._settled_at = count, now
        if count >= _MOST_BATCHES or (self._settled_at is not None and self._is_enough(count, now)):
            trainer.should_stop = True

    def _is_enough(self, count: int, now: float) -> bool:
        assert self._settled_at is not None
        batches, seconds = count - self._settled_at[0], now - self._settled_at[1]
        if batches >= self._least_batches:
            return seconds >= self._least_s or batches >= self._most_batches
        return batches >= 2 and seconds >= _LONG_S
