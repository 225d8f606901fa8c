"""Whether an optimizer step was applied yet: before it, zero-initialised layers and a settling scale mislead."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from typing_extensions import final

from lightning_amp.precision import AmpPrecision

_PATIENCE = 3  # skipped steps that move no scale: waiting for an applied one may be in vain


@final
class FirstStep:
    """Asks once per optimizer step, until the first that was applied.

    Attributes:
        waits: Whether the answer was no so far.

    Cost: one wait for the device per step, only up to the first that was applied.

    """

    def __init__(self) -> None:
        self.waits = True
        self._asked_at: int | None = None
        self._scale_before: float | None = None
        self._num_idle = 0

    def is_applied(self, trainer: Trainer) -> bool:
        """Return whether a step was applied, or there is no use in waiting: the scale moves no more, or is below 1."""
        step = trainer.global_step
        if self.waits and step != self._asked_at:
            scale = _scale(trainer)
            self.waits = step == 0 or not self._look(trainer, scale)
            self._scale_before = scale
        self._asked_at = step
        return not self.waits

    def can_wait(self, trainer: Trainer) -> bool:
        """Return whether there is a batch to come in this fit, at the end of one."""
        steps = trainer.max_steps
        if trainer.should_stop or 0 < steps <= trainer.global_step:
            return False
        return not trainer.is_last_batch or trainer.current_epoch + 1 != trainer.max_epochs

    def _look(self, trainer: Trainer, scale: float | None) -> bool:
        plugin = trainer.precision_plugin
        if isinstance(plugin, AmpPrecision):
            if plugin.num_steps > 0 or plugin.num_skipped == 0:
                return True
            before = None if plugin.last_step is None else plugin.last_step.scale
        else:  # of another plugin only the scale is known: a skip lowers it
            before = self._scale_before
        fell = scale is not None and before is not None and scale < before
        if not fell and not isinstance(plugin, AmpPrecision):
            return True
        if fell and scale is not None and scale < 1:
            return True
        self._num_idle += not fell
        return self._num_idle > _PATIENCE


def _scale(trainer: Trainer) -> float | None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
