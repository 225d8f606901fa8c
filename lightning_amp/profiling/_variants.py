"""The same training step with one thing changed, timed in turns: what an advice gains here, tried."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp._text import counted
from lightning_amp.advice import Variant, compare
from lightning_amp.profiling._laps import Laps
from lightning_amp.profiling._watch import Watch
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
class Contestant:
    """A variant that takes part.

    Args:
        label: What is different.
        make: Returns a module and a plugin of its own, which are kept from round to round.
        batches: What it trains on.
        watch: What looks at its first fit, if anything does.

    """

    def __init__(
        self,
        label: str,
        make: Callable[[], tuple[LightningModule, Any]],
        batches: Batches,
        watch: Watch | None = None,
    ) -> None:
        self.label, self._make, self._batches, self._watch = label, make, batches, watch
        self._made: tuple[LightningModule, Any] | None = None
        self.step_s: list[float] = []
        self.error = ""

    def round(
        self, device: torch.device, kwargs: Mapping[str, Any], data: LightningDataModule | None, laps: int
    ) -> None:
        """Train for some steps, and note how long they took; after an error nothing more."""
        if self.error:
            return
        try:
            if self._made is None:
                self._made = self._make()
                if self._watch is not None:
                    self._fit(self._watch, device, kwargs, data)
            before = 3 if laps > 1 and not self.step_s else 1
            timed = Laps(device, laps, num_before=before)
            self._fit(timed, device, kwargs, data)
            if timed.step_s:
                self.step_s.append(median(timed.step_s))
        except Exception as error:
            text = "there was not enough memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            self.error = text.partition("\n")[0][:300]
            self.step_s.clear()
            self._made = None

    def _fit(
        self, callback: Any, device: torch.device, kwargs: Mapping[str, Any], data: LightningDataModule | None
    ) -> None:
        assert self._made is not None
        module, plugin = self._made
        trainer = private_trainer(device, plugin, [callback], kwargs, limit_val_batches=0)
        if isinstance(callback, Watch):
            trainer.profiler = callback.profiler()  # type: ignore[attr-defined]
        with giving(data, self._batches) as source:
            run_private_fit(trainer, module, **source)

    def result(self) -> Variant:
        """Return what was found."""
        return Variant(self.label, tuple(self.step_s), self.error)


def race(
    contestants: Sequence[Contestant],
    device: torch.device,
    kwargs: Mapping[str, Any],
    data: LightningDataModule | None,
    *,
    known_s: float = 0.0,
    budget_s: float = _BUDGET_S,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Variant, ...]:
    """Time all in turns, so that what else the machine does meets all of them.

    Args:
        contestants: The first is the reference. The first two matter most: where steps are long, the others are left
            out.
        device: Where.
        kwargs: Of the Trainer.
        data: Whose batches they are; `None` if they are the module's.
        known_s: Seconds of a step of the reference, as timed before. If the least number of rounds would take longer
            than the budget, this one time stands for it, and the second contestant runs once.
        budget_s: Seconds that all rounds may take.
        say: Gets the progress.

    """
    reference, *others = contestants
    if known_s * 2 * _ROUNDS[0] > budget_s:
        return _one_run_of_each(reference, others, device, kwargs, data, known_s)
    taking_part, laps, began = list(contestants), _LAPS, time.perf_counter()
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
            contestant.round(device, kwargs, data, laps)
    return tuple(contestant.result() for contestant in contestants)


def _one_run_of_each(
    reference: Contestant,
    others: Sequence[Contestant],
    device: torch.device,
    kwargs: Mapping[str, Any],
    data: LightningDataModule | None,
    known_s: float,
) -> tuple[Variant, ...]:
    """Time the second contestant once, beside what is known of the first."""
    for contestant in others[:1]:
        contestant.round(device, kwargs, data, 1)
    left_out = f"left out, since a step takes {known_s:.3g} s"
    return (
        Variant(reference.label, (known_s,)),
        *(contestant.result() for contestant in others[:1]),
        *(Variant(contestant.label, (), left_out) for contestant in others[1:]),
    )


def _is_open(contestant: Contestant, reference: Contestant) -> bool:
    """Return whether more rounds could decide how fast a contestant is."""
    found = compare(tuple(contestant.step_s), tuple(reference.step_s)) if contestant is not reference else None
    return found is not None and found.claim == "undecided"


# -- what is changed ---------------------------------------------------------------------------------------------------


def fuse_optimizers(module: LightningModule) -> LightningModule:
    """Let the optimizers that this module configures be fused; the module is ours."""
    configure = module.configure_optimizers

    def configure_optimizers() -> Any:
        found = configure()
        for optimizer in _optimizers_in(found):
            if can_fuse(optimizer):
                _fuse(optimizer)
        return found

    vars(module)["configure_optimizers"] = configure_optimizers
    return module


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer fused that has not stepped yet; schedules that know it go on with it."""
    groups: list[Any] = optimizer.param_groups
    for group in groups:
        group.update(fused=True, foreach=False)
    legal = inspect.signature(type(optimizer)).parameters
    settings: Any = {name: value for name, value in optimizer.defaults.items() if name in legal}
    make: Any = type(optimizer).__init__
    make(optimizer, groups, **{**settings, "fused": True, "foreach": False})


def can_fuse(optimizer: Any) -> bool:
    """Return whether an optimizer has one kernel for its step, and does not use it."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    if type(optimizer) not in kinds or _torch.is_fused(optimizer):
        return False
    groups = optimizer.param_groups
    if any(group.get("differentiable") or group.get("foreach") for group in groups):
        return False
    parameters = [parameter for group in groups for parameter in group["params"]]
    kinds_of_device = ["cpu"] if type(optimizer) is torch.optim.Adagrad else _torch.fused_device_types()
    return all(p.is_floating_point() and p.device.type in kinds_of_device for p in parameters)


def _optimizers_in(found: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(found, torch.optim.Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from _optimizers_in(found.get("optimizer"))
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _optimizers_in(item)


def has_convolutions(module: nn.Module) -> bool:
    """Return whether there are convolutions over images."""
    return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in module.modules())


def to_channels_last(module: LightningModule) -> LightningModule:
    """Keep its images with the channels last; the module is ours."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def joined(batches: Sequence[Any], times: int) -> list[Any] | None:
    """Return batches that are `times` as large; `None` if nobody knows how to join them."""
    if not batches:
        return None
    parts = [copy_batch(batches[i % len(batches)]) for i in range(times)]
    try:
        return [_join(parts)]
    except (ValueError, TypeError, RuntimeError):
        return None


def _join(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        if not first.dim():
            raise ValueError("a number has no rows")
        return torch.cat(list(parts))
    if type(first) is dict:
        return {name: _join([part[name] for part in parts]) for name in first}
    if type(first) in (list, tuple):
        if not all(isinstance(item, (Tensor, dict, list, tuple)) for item in first):
            raise ValueError("it holds what cannot be joined")
        return type(first)(_join(items) for items in zip(*parts, strict=True))
    raise ValueError(f"{type(first).__name__} cannot be joined")
