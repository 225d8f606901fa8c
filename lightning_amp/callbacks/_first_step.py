"""Find out when the first optimizer step was applied.

A sample before that step misleads: the scale is still falling, and layers that begin at zero have not moved.
"""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from typing_extensions import final

from lightning_amp.precision import AmpPrecision

_PATIENCE = 3  # after more skipped steps that do not move the scale, waiting is useless


@final
class FirstStep:
    """Checks once per optimizer step whether a step was applied, until the first one was.

    Cost: one wait for the device per step, up to the first applied step.

    """

    def __init__(self) -> None:
        self._waits = True
        self._asked_at: int | None = None
        self._scale_before: float | None = None
        self._num_idle = 0

    def is_applied(self, trainer: Trainer) -> bool:
        """Return whether a step was applied, or waiting is useless because the scale is below 1 or no longer moves."""
        step = trainer.global_step
        if self._waits and step != self._asked_at:
            scale = _scale(trainer)
            self._waits = step == 0 or not self._look(trainer, scale)
            self._scale_before = scale
        self._asked_at = step
        return not self._waits

    def can_wait(self, trainer: Trainer) -> bool:
        """Return, at the end of a batch, whether another batch follows in this fit."""
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
        else:  # with another plugin only the scale can be read, and a skip lowers it
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
