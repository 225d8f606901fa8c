"""Time the same training step with one setting changed, in turns. The doctor advises only changes that it has tried."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from typing_extensions import final, override

from lightning_amp._text import counted
from lightning_amp.advice._gains import compare
from lightning_amp.advice._record import Label, Step, Variant
from lightning_amp.advice._watch import MOST_SETTLING, Watch, is_settling
from lightning_amp.measure import StepTimer
from lightning_amp.shadow import copy_batch, is_out_of_memory, private_trainer, run_private_fit

_ROUNDS = (3, 9, 18)
"""The least number of rounds, the number after which a race ends if all claims are decided, and the largest number."""
_LAPS = 4
_FEW = 3
_BUDGET_S = 18.0
"""Seconds for all rounds.

The least number of rounds may take longer, unless a single step already takes a large part of this time.
"""


@final
class Laps(Callback):
    """Time some steps of a fit, and end the fit.

    `num_before` steps come first, or more if the loss scale is still settling. `step_s` has the seconds of each step.
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
class Batches:
    """A loader without end that repeats copies of some batches of the user's `loader`.

    It has the attributes of that loader, because modules may read them (`dataset`, `batch_size`).
    """

    def __init__(self, batches: Sequence[Any], loader: Any = None) -> None:
        self._batches, self._loader = list(batches), loader

    def __iter__(self) -> Iterator[Any]:
        return (copy_batch(batch) for batch in itertools.cycle(self._batches))

    def __len__(self) -> int:
        return 10_000

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_loader"], name)


@contextmanager
def giving(data: LightningDataModule | None, loader: Batches) -> Generator[Any]:
    """Make a data module return this loader and prepare nothing; yield the arguments of `Trainer.fit`."""
    if data is None:
        yield {"train_dataloaders": loader}
        return

    def nothing(*_: Any, **__: Any) -> None:
        return None

    own: dict[str, Any] = dict.fromkeys(("prepare_data", "setup", "teardown"), nothing)
    before = dict(vars(data))
    vars(data).update(own, train_dataloader=lambda: loader)
    try:
        yield {"data": data}
    finally:
        vars(data).clear()
        vars(data).update(before)


@final
@dataclass(frozen=True)
class Track:
    """The setting that all contestants share: the device, the user's Trainer arguments, and the data module, if any."""

    device: torch.device
    trainer_kwargs: Mapping[str, Any]
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
    batches: Batches
    is_watched: bool = False
    made: tuple[LightningModule, Any] | None = None
    step_s: list[float] = field(default_factory=list)
    error: str = ""
    record: Step | None = None

    def round(self, track: Track, laps: int) -> None:
        """Train for some steps, and note how long they took. Do nothing if an earlier round failed."""
        if self.error:
            return
        try:
            if self.made is None:
                self.made = self.make()
                if self.is_watched:
                    watch = Watch(track.device, __file__, timed=False)
                    self._fit(self.made, watch, track)
                    self.record = watch.step
            timed = Laps(track.device, laps, num_before=3 if laps > 1 and not self.step_s else 1)
            self._fit(self.made, timed, track)
            if timed.step_s:
                self.step_s.append(median(timed.step_s))
        except Exception as error:
            text = "there was not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            self.error = text.partition("\n")[0][:300]
            self.step_s.clear()
            self.made = None

    def _fit(self, made: tuple[LightningModule, Any], callback: Callback, track: Track) -> None:
        module, plugin = made
        trainer = private_trainer(track.device, plugin, [callback], track.trainer_kwargs, limit_val_batches=0)
        with giving(track.data_module, self.batches) as source:
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
        known_s: Seconds of a step of the reference, as timed before. If the least number of rounds would exceed the
            budget, this is the reference's only time, and the second contestant runs once.
        say: Called with the progress.

    """
    if known_s * 2 * _ROUNDS[0] > _BUDGET_S:
        return _one_run_of_each(contestants, track, known_s)
    reference, taking_part = contestants[0], list(contestants)
    laps, began = _LAPS, time.perf_counter()
    if known_s * _LAPS * _ROUNDS[0] * len(taking_part) > _BUDGET_S:
        taking_part, laps = taking_part[:_FEW], 1
    for number in range(_ROUNDS[2]):
        elapsed = time.perf_counter() - began
        if number == 1 and elapsed * _ROUNDS[0] > _BUDGET_S:
            taking_part, laps = taking_part[:_FEW], 1
        if number >= _ROUNDS[0] and elapsed * (number + 1) / number > _BUDGET_S:
            break
        if number == _ROUNDS[1] and not any(_is_open(contestant, reference) for contestant in taking_part):
            break
        most = _ROUNDS[1 if number < _ROUNDS[1] else 2]
        say(f"round {number + 1} of {most} at most, {counted(len(taking_part), 'variant')}")
        for contestant in taking_part if number % 2 == 0 else taking_part[::-1]:
            contestant.round(track, laps)
    return tuple(contestant.result() for contestant in contestants)


def _one_run_of_each(contestants: Sequence[Contestant], track: Track, known_s: float) -> tuple[Variant, ...]:
    """Time the second contestant once, and keep the known time of the first."""
    reference, *others = contestants
    for contestant in others[:1]:
        contestant.round(track, 1)
    left_out = f"left out, since a step takes {known_s:.3g} s"
    return (
        Variant(reference.label, (known_s,)),
        *(contestant.result() for contestant in others[:1]),
        *(Variant(contestant.label, (), left_out) for contestant in others[1:]),
    )


def _is_open(contestant: Contestant, reference: Contestant) -> bool:
    """Return whether more rounds could decide if a contestant is faster or slower."""
    found = compare(contestant.step_s, reference.step_s) if contestant is not reference else None
    return found is not None and found.claim == "undecided"
