"""Time the same training step with one setting changed, in turns. The doctor advises only changes that it has tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from typing_extensions import final, override

from lightning_amp._compat._names import Callback, LightningDataModule, LightningModule, Trainer
from lightning_amp._text import counted
from lightning_amp.advice._machine import compare
from lightning_amp.advice._step import FUSED, Label, Step, Variant
from lightning_amp.advice._watch import MOST_SETTLING, Watch, can_fuse, fuse, is_settling
from lightning_amp.measure import StepTimer
from lightning_amp.shadow import Batches, giving, is_out_of_memory, private_trainer, run_private_fit

_ROUNDS = (3, 9, 18)
"""The least number of rounds, the number after which a race ends if all claims are decided, and the largest number.

A step that takes a large part of the budget runs in fewer rounds.
"""
_LAPS = 4
_FEW = 3
"""Number of contestants that take part where steps are long."""
_BUDGET_S = 18.0
"""Seconds for all rounds."""


@final
class Laps(Callback):
    """Time some steps of a fit, and end the fit.

    `num_before` steps come first, or more if the loss scale is still settling. `step_s` has the seconds of each step.
    `fused` turns on `fused=True` in the optimizers.
    """

    def __init__(self, device: torch.device, num_laps: int, num_before: int, *, fused: bool = False) -> None:
        self._timer, self._num_laps, self._before, self._fused = StepTimer(device), num_laps, num_before, fused
        self._num_batches = 0
        self.step_s: list[float] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in filter(can_fuse, trainer.optimizers if self._fused else ()):
            fuse(optimizer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._timer.resume()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._num_batches > self._before:
            self._timer.lap()
        elif self._num_batches == self._before < MOST_SETTLING and is_settling(trainer):
            self._before += 1
        trainer.should_stop = self._timer.num_laps >= self._num_laps

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pause()
        self.step_s = self._timer.step_s(range(self._timer.num_laps))


@final
@dataclass(frozen=True)
class Track:
    """The device, Trainer arguments, batches, and data module (if there is one) of all contestants."""

    device: torch.device
    trainer_kwargs: Mapping[str, Any]
    batches: Batches
    data_module: LightningDataModule | None = None


@final
@dataclass
class Contestant:
    """A variant that takes part in a race.

    Attributes:
        make: Returns a module and a plugin of its own. The contestant keeps both in `made` for all rounds.
        is_watched: Whether to record a step, in a fit before the first round.
        step_s: The median seconds of a step in each round.
        record: The record of a step, if `is_watched`.

    """

    label: Label
    make: Callable[[], tuple[LightningModule, Any]]
    is_watched: bool = False
    made: tuple[LightningModule, Any] | None = None
    step_s: list[float] = field(default_factory=list)
    error: str = ""
    record: Step | None = None

    def round(self, track: Track, laps: int) -> None:
        """Train for some steps, and note how long they took. Do nothing if an earlier round failed."""
        if self.error:
            return
        is_new = self.made is None and not self.is_watched
        try:
            if self.made is None:
                self.made = self.make()
                if self.is_watched:
                    watch = Watch(track.device, __file__, timed=False)
                    self._fit(self.made, watch, track)
                    self.record = watch.step
            num_before = int(is_new) if laps == 1 else 1 if self.step_s else 3
            timed = Laps(track.device, laps, num_before, fused=self.label == FUSED)
            self._fit(self.made, timed, track)
            self.step_s.extend([median(timed.step_s)] if timed.step_s else [])
        except Exception as error:
            text = "there was not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            self.error = text.partition("\n")[0][:300]
            self.step_s.clear()
            self.made = None

    def _fit(self, made: tuple[LightningModule, Any], callback: Callback, track: Track) -> None:
        module, plugin = made
        trainer = private_trainer(track.device, plugin, [callback], track.trainer_kwargs, limit_val_batches=0)
        with giving(track.data_module, track.batches) as source:
            run_private_fit(trainer, module, **source)

    def result(self) -> Variant:
        """Return the times, or the error that ended the contestant."""
        return Variant(self.label, tuple(self.step_s), self.error)


def race(
    contestants: Sequence[Contestant],
    track: Track,
    *,
    known_s: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Variant, ...]:
    """Time all contestants in turns, so that other work on the machine slows down all of them.

    Args:
        contestants: The first one is the reference. Where steps are long, only the first ones take part.
        track: Where they run.
        known_s: Seconds of a step of the reference, as timed before.
        say: Called with the progress.

    """
    reference, began = contestants[0], time.perf_counter()
    is_long = known_s * _LAPS * _ROUNDS[0] * len(contestants) > _BUDGET_S
    for number in range(_ROUNDS[2]):
        elapsed = time.perf_counter() - began
        is_long = is_long or (number == 1 and elapsed * _ROUNDS[0] > _BUDGET_S)
        if number and elapsed * (number + 1) / number > _BUDGET_S * (2 if number < _ROUNDS[0] else 1):
            break
        if number == _ROUNDS[1] and not any(_is_open(contestant, reference) for contestant in contestants):
            break
        most = _ROUNDS[1 if number < _ROUNDS[1] else 2]
        taking_part = contestants[:_FEW] if is_long else contestants
        say(f"round {number + 1} of {most} at most, {counted(len(taking_part), 'variant')}")
        for contestant in taking_part if number % 2 == 0 else taking_part[::-1]:
            contestant.round(track, 1 if is_long else _LAPS)
    return tuple(contestant.result() for contestant in contestants)


def _is_open(contestant: Contestant, reference: Contestant) -> bool:
    """Return whether more rounds could decide if a contestant is faster or slower."""
    found = compare(contestant.step_s, reference.step_s) if contestant is not reference else None
    return found is not None and found.claim == "undecided"
