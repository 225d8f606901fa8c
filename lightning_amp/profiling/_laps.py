"""The callback that times some steps of a fit that has settled."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import final, override

from lightning_amp.precision import AmpPrecision

MOST_SETTLING = 40
"""Steps after which a loss scale is taken as it is."""


@final
class Laps(Callback):
    """Times some steps of a fit that has settled, and ends it.

    Args:
        device: Where.
        num_laps: How many steps are timed.
        num_before: How many are not, at least.

    Attributes:
        step_s: Seconds of each.

    """

    def __init__(self, device: torch.device, num_laps: int, num_before: int = 1) -> None:
        self._where, self._num_laps, self._before = device, num_laps, num_before
        self._num_batches = 0
        self._start_s = 0.0
        self._events: list[Any] = []
        self.step_s: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._start_s = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        trainer.should_stop = False
        if self._num_batches < self._before:
            return
        if self._num_batches == self._before:
            if is_settling(trainer) and self._before < MOST_SETTLING:
                self._before += 1
            self._mark()
            return
        self._mark()
        if self._where.type != "cuda":
            self.step_s.append(time.perf_counter() - self._start_s)
        trainer.should_stop = self._num_batches - self._before >= self._num_laps

    def _mark(self) -> None:
        if self._where.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._where))
            self._events.append(event)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._events:
            torch.cuda.synchronize(self._where)
            laps = self._events[-self._num_laps - 1 :]
            self.step_s = [a.elapsed_time(b) / 1e3 for a, b in pairwise(laps)]


def is_settling(trainer: Trainer) -> bool:
    """Return whether the last step was skipped: a dynamic loss scale that comes down. Waits for the device."""
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AmpPrecision) or plugin.last_step is None:
        return False
    return plugin.last_step.skipped
