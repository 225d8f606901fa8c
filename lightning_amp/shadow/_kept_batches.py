"""Keep batches of a private fit as its loaders gave them, and give them to later fits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import final

from lightning_amp.shadow._module_copy import copy_batch

_HOOK = "on_before_batch_transfer"


def keep_batches(trainer: Trainer, module: LightningModule, keep: Callable[[Any, int], None]) -> Callable[[], object]:
    """Call `keep` with each batch and the index of its loader, before hooks of the user change the batch.

    Both the module and the data module must be ones that no other code holds.

    Returns:
        A function that ends this.

    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    owner: Any = data if data is not None and is_overridden(_HOOK, data) else module
    real = getattr(owner, _HOOK)

    @functools.wraps(real)
    def hook(batch: Any, dataloader_idx: int) -> Any:
        keep(batch, dataloader_idx)
        return real(batch, dataloader_idx)

    return set_method(owner, _HOOK, hook)


def set_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Set a method of an object that no other code holds, and return a function that restores the original."""
    own, before = vars(owner), dict(vars(owner))
    own[name] = method

    def restore() -> None:
        own.pop(name, None)
        own.update({name: before[name]} if name in before else {})

    return restore


@final
class Batches:
    """A loader that gives copies of some batches of the user's `loader`, without end unless `num` of them are enough.

    It has the attributes of that loader, because modules may read them (`dataset`, `batch_size`).
    """

    def __init__(self, batches: Sequence[Any], loader: Any = None, num: int | None = None) -> None:
        self._batches, self._loader, self._num = list(batches), loader, num

    def __iter__(self) -> Iterator[Any]:
        return (copy_batch(batch) for batch in itertools.islice(itertools.cycle(self._batches), self._num))

    def __len__(self) -> int:
        return 10_000 if self._num is None else self._num

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_loader"], name)


@contextmanager
def giving(data: LightningDataModule | None, training: Batches, validation: Any = None) -> Generator[dict[str, Any]]:
    """Make a data module return these loaders and prepare nothing; yield the arguments of `Trainer.fit`."""
    if data is None:
        yield {"train_dataloaders": training, "val_dataloaders": validation}
        return
    before = dict(vars(data))
    vars(data).update(dict.fromkeys(("prepare_data", "setup", "teardown"), lambda *_, **__: None))
    vars(data).update(train_dataloader=lambda: training, val_dataloader=lambda: validation or [])
    try:
        yield {"data": data}
    finally:
        vars(data).clear()
        vars(data).update(before)
