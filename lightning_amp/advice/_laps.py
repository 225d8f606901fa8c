"""The callback that times some steps of a fit that has settled."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import final, override

from lightning_amp.measure import StepTimer
from lightning_amp.precision import AmpPrecision

MOST_SETTLING = 40
"""Steps after which a loss scale is taken as it is."""


@final
class Laps(Callback):
    """Times some steps of a fit that has settled, and ends it.

    Args:
        num_laps: How many steps are timed.
        num_before: How many are not, at least.

    Attributes:
        step_s: Seconds of each.

    """

    def __init__(self, device: torch.device, num_laps: int, num_before: int = 1) -> None:
        self._timer, self._num_laps, self._before = StepTimer(device), num_laps, num_before
        self._num_batches = 0
        self.step_s: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._timer.resume()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        trainer.should_stop = False
        if self._num_batches > self._before:
            self._timer.lap()
            trainer.should_stop = self._timer.num_laps >= self._num_laps
        elif self._num_batches == self._before < MOST_SETTLING and is_settling(trainer):
            self._before += 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pause()
        self.step_s = self._timer.step_s(range(self._timer.num_laps))


def is_settling(trainer: Trainer) -> bool:
    """Return whether the last step was skipped: a dynamic loss scale that comes down. Waits for the device."""
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AmpPrecision) or plugin.last_step is None:
        return False
    return plugin.last_step.skipped
