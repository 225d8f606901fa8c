"""The same training step with one thing changed, timed in turns: what an advice gains here, tried."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import final

from lightning_amp._text import counted
from lightning_amp.advice._gains import compare
from lightning_amp.advice._laps import Laps
from lightning_amp.advice._record import Label, Variant
from lightning_amp.advice._watch import Watch, Watched
from lightning_amp.shadow import copy_batch, is_out_of_memory, private_trainer, run_private_fit

_ROUNDS = (3, 9, 18)
"""At least; then, if the budget lasts, until a first look at the claims; then, as long as one is open, at most."""
_LAPS = 4
_FEW = 3
_BUDGET_S = 18.0
"""Seconds for all rounds. The least number of them is done beyond it, but never for a step that takes much of it."""


@final
class Batches:
    """Copies of some batches, again and again, as if they were an epoch that does not end.

    Args:
        batches: As the loader gave them.
        loader: Which did; what modules ask it for (`dataset`, `batch_size`) it answers.

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
    """Let a data module give these batches, and prepare nothing; yields what `Trainer.fit` takes."""
    if data is None:
        yield {"train_dataloaders": loader}
        return

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def train_dataloader() -> Batches:
        return loader

    own: dict[str, Any] = dict.fromkeys(("prepare_data", "setup", "teardown"), nothing)
    before = dict(vars(data))
    vars(data).update(own, train_dataloader=train_dataloader)
    try:
        yield {"data": data}
    finally:
        vars(data).clear()
        vars(data).update(before)


@final
@dataclass(frozen=True)
class Track:
    """Where all run: the device, the user's arguments of the Trainer, and the data module, if there is one."""

    device: torch.device
    trainer_kwargs: Mapping[str, Any]
    data_module: LightningDataModule | None = None


@final
class Contestant:
    """A variant that takes part.

    Args:
        label: What is different.
        make: Returns a module and a plugin of its own, which are kept from round to round.
        batches: What it trains on.
        is_watched: Whether a step is recorded in a fit before the first round.

    Attributes:
        step_s: Seconds of a step, one median by round.
        error: What it ended with; empty if nothing.
        watched: What was seen in that fit.

    """

    def __init__(
        self,
        label: Label,
        make: Callable[[], tuple[LightningModule, Any]],
        batches: Batches,
        *,
        is_watched: bool = False,
    ) -> None:
        self.label: Label = label
        self._make, self._batches, self._is_watched = make, batches, is_watched
        self._made: tuple[LightningModule, Any] | None = None
        self.step_s: list[float] = []
        self.error = ""
        self.watched: Watched | None = None

    def round(self, track: Track, laps: int) -> None:
        """Train for some steps, and note how long they took; after an error nothing more."""
        if self.error:
            return
        try:
            if self._made is None:
                self._made = self._make()
                if self._is_watched:
                    watch = Watch(track.device, __file__, timed=False)
                    self._fit(watch, track)
                    self.watched = watch.watched
            before = 3 if laps > 1 and not self.step_s else 1
            timed = Laps(track.device, laps, num_before=before)
            self._fit(timed, track)
            if timed.step_s:
                self.step_s.append(median(timed.step_s))
        except Exception as error:
            text = "there was not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            self.error = text.partition("\n")[0][:300]
            self.step_s.clear()
            self._made = None

    def _fit(self, callback: Watch | Laps, track: Track) -> None:
        assert self._made is not None
        module, plugin = self._made
        trainer = private_trainer(track.device, plugin, [callback], track.trainer_kwargs, limit_val_batches=0)
        if isinstance(callback, Watch):
            trainer.profiler = callback.profiler()  # type: ignore[attr-defined]
        with giving(track.data_module, self._batches) as source:
            run_private_fit(trainer, module, **source)

    def result(self) -> Variant:
        """Return what was found."""
        return Variant(self.label, tuple(self.step_s), self.error)


def race(
    contestants: Sequence[Contestant],
    track: Track,
    *,
    known_s: float = 0.0,
    budget_s: float = _BUDGET_S,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Variant, ...]:
    """Time all in turns, so that what else the machine does meets all of them.

    Args:
        contestants: The first is the reference. The first two matter most: where steps are long, the others are left
            out.
        track: Where they run.
        known_s: Seconds of a step of the reference, as timed before. If the least number of rounds would take longer
            than the budget, this one time stands for it, and the second contestant runs once.
        budget_s: Seconds that all rounds may take.
        say: Gets the progress.

    """
    if known_s * 2 * _ROUNDS[0] > budget_s:
        return _one_run_of_each(contestants, track, known_s)
    reference, taking_part = contestants[0], list(contestants)
    laps, began = _LAPS, time.perf_counter()
    if known_s * _LAPS * _ROUNDS[0] * len(taking_part) > budget_s:
        taking_part, laps = taking_part[:_FEW], 1
    for number in range(_ROUNDS[2]):
        elapsed = time.perf_counter() - began
        if number == 1 and elapsed * _ROUNDS[0] > budget_s:
            taking_part, laps = taking_part[:_FEW], 1
        if number >= _ROUNDS[0] and elapsed * (number + 1) / number > budget_s:
            break
        if number == _ROUNDS[1] and not any(_is_open(contestant, reference) for contestant in taking_part):
            break
        most = _ROUNDS[1 if number < _ROUNDS[1] else 2]
        say(f"round {number + 1} of {most} at most, {counted(len(taking_part), 'variant')}")
        for contestant in taking_part if number % 2 == 0 else taking_part[::-1]:
            contestant.round(track, laps)
    return tuple(contestant.result() for contestant in contestants)


def _one_run_of_each(contestants: Sequence[Contestant], track: Track, known_s: float) -> tuple[Variant, ...]:
    """Time the second contestant once, beside what is known of the first."""
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
    """Return whether more rounds could decide how fast a contestant is."""
    found = compare(contestant.step_s, reference.step_s) if contestant is not reference else None
    return found is not None and found.claim == "undecided"
