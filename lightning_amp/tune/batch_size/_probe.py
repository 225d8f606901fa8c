"""End a short training as soon as its measurements are complete, and record the sizes of its batches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sized as HasLength
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import final, override

from lightning_amp._text import literal
from lightning_amp.compare import num_rows
from lightning_amp.tune.batch_size._batch_size_attribute import ModuleLoaders, held_sizes, is_size
from lightning_amp.tune.batch_size._learning_rate import UsedRate
from lightning_amp.tune.batch_size._short_training import StopWhenMeasured

_STEADY_BATCHES, _STEADY_S, _MOST_STEADY_BATCHES = 6, 2.0, 100

_NO_PLACE = (
    "`make_data` or `make_module` must have a `batch_size`, an attribute or one of `hparams`, that the loaders are made"
    " with; there is none in {found}. Write `self.batch_size = batch_size` in `__init__`, and"
    " `DataLoader(..., batch_size=self.batch_size)` in `train_dataloader`."
)


@final
@dataclass(frozen=True)
class Facts:
    """Facts about one training that the measurements of a run do not contain.

    Attributes:
        refused: Message for the user if the module cannot be measured at all.
        own_size: The batch size that was set.
        num_rows: Rows that an epoch draws, on each device; `None` if unknown or endless.
        loader_sizes: The batch size of each training loader; `None` for a loader that has none.
        batch_rows: Rows of the largest batch, by its tensors' first dimension; `None` if unknown.
        num_batches: Number of trained batches.
        accumulated: Batches for each optimizer step.
        world_size: Number of devices.
        device: Type of the device; empty if training did not begin.
        device_gib: Memory that this process can use; `None` if the device does not report it.
        rates: The learning rate of each parameter group.

    """

    refused: str | None = None
    own_size: int = 0
    num_rows: int | None = None
    loader_sizes: tuple[int | None, ...] = ()
    batch_rows: int | None = None
    num_batches: int = 0
    accumulated: int = 1
    world_size: int = 1
    device: str = ""
    device_gib: float | None = None
    rates: tuple[UsedRate, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Facts:
        """Read the file that :class:`Probe` wrote; return the defaults if it is missing or torn."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        data["loader_sizes"] = tuple(data["loader_sizes"])
        data["rates"] = tuple(UsedRate(*rate) for rate in data["rates"])
        return cls(**data)


@final
class Probe(Callback):
    """Ends a training as soon as its memory and its speed are known, and writes the facts to `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._facts: dict[str, Any] = asdict(Facts())
        self._stop = StopWhenMeasured(_STEADY_BATCHES, _STEADY_S, _MOST_STEADY_BATCHES)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        self._stop.setup(trainer, pl_module, stage)
        sizes = held_sizes(pl_module, data)
        known = [int(size) for size in sizes if is_size(size)]
        if not sizes:
            owners = [pl_module] if isinstance(data, ModuleLoaders) else [data, pl_module]
            self._refuse(_NO_PLACE.format(found=" and ".join(f"`{type(owner).__name__}`" for owner in owners)))
        elif not known:
            self._refuse(f"`batch_size` must be an integer of 1 or more to begin with, got {literal(sizes[-1])}.")
        self._note(own_size=known[-1])

    def _refuse(self, text: str) -> None:
        self._note(refused=text)
        raise ValueError(text)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop.on_train_start(trainer, pl_module)
        self._note(
            **_facts_of_data(trainer),
            accumulated=trainer.accumulate_grad_batches,
            world_size=trainer.world_size,
            device=trainer.strategy.root_device.type,
            device_gib=_free_gib(trainer.strategy.root_device),
            rates=[rate for optimizer in trainer.optimizers for rate in _rates(optimizer)],
        )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rows = num_rows(batch)
        if rows is not None and rows > (self._facts["batch_rows"] or 0):
            self._note(batch_rows=rows)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._stop.on_train_batch_end(trainer)
        self._facts["num_batches"] = self._stop.num_batches

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._facts["num_batches"] == 0:  # `fit` ended before the first batch
            with contextlib.suppress(Exception):
                self._facts.update(_facts_of_data(trainer))
        self._note()

    def _note(self, **facts: Any) -> None:
        self._facts.update(facts)
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        Path(self._path).write_text(json.dumps(self._facts), encoding="utf-8")


def _facts_of_data(trainer: Trainer) -> dict[str, Any]:
    loaders = CombinedLoader(trainer.train_dataloader, "sequential").flattened
    rows = [_num_rows(loader) for loader in loaders]
    known = [number for number in rows if number is not None]
    return {
        "num_rows": max(known) if known and len(known) == len(rows) else None,
        "loader_sizes": [_loader_size(loader) for loader in loaders],
    }


def _loader_size(loader: Any) -> int | None:
    places = loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    sizes: list[Any] = [getattr(place, "batch_size", None) for place in places]
    return next((int(size) for size in sizes if is_size(size)), None)


def _num_rows(loader: Any) -> int | None:
    """Return how many rows an epoch draws, without drawing them."""
    if not isinstance(loader, DataLoader):
        return None
    rows: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
    if loader.batch_sampler is None:  # `batch_size=None`: each drawn index is a whole batch
        rows = getattr(rows, "sampler", None)  # of a `BatchSampler`
    try:
        return len(rows) if isinstance(rows, HasLength) else None
    except (TypeError, NotImplementedError):
        return None


def _free_gib(device: torch.device) -> float | None:
    """Return the memory that this process can use: the free memory and the memory that it already holds."""
    if device.type == "cpu":
        return None
    backend: Any = torch.get_device_module(device.type)
    with contextlib.suppress(Exception):  # not every device reports its memory
        free, _ = backend.mem_get_info(device)
        return (free + backend.memory_reserved(device)) / 2**30
    return None


def _rates(optimizer: torch.optim.Optimizer) -> list[UsedRate]:
    """Return the rate of each group as the user set it; a schedule may have changed the current one already."""
    found: list[UsedRate] = []
    for group in optimizer.param_groups:
        rate: Any = group.get("max_lr", group.get("initial_lr", group.get("lr")))
        with contextlib.suppress(TypeError, ValueError):
            found.append(UsedRate(type(optimizer).__name__, float(rate)))
    return found
