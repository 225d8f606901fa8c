"""Read and set the batch size of a module or a data module: `batch_size`, or `hparams.batch_size`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping
from numbers import Integral
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import final, override

NAME = "batch_size"


def held_sizes(*owners: Any) -> list[Any]:
    """Return all batch sizes of these objects; Lightning's own finder would read only the last one."""
    sizes: list[Any] = []
    for owner in owners:
        sizes += _attribute(owner)
        if hparams := _hparams(owner):
            sizes.append(hparams[NAME])
    return sizes


def hold_size(owner: Any, size: int) -> None:
    """Set the batch size wherever the owner holds one, as Lightning's finder does."""
    if _attribute(owner):
        with contextlib.suppress(AttributeError):  # a property that reads `hparams`
            setattr(owner, NAME, size)
    if hparams := _hparams(owner):
        hparams[NAME] = size


def is_size(value: object) -> bool:
    """Return whether a value is an integer of 1 or more."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


@final
class FactoryWithBatchSize:
    """A factory that also sets the batch size of the object it makes; `None` keeps the user's own size."""

    def __init__(self, factory: Callable[[], Any], size: int | None) -> None:
        self.__wrapped__ = factory  # another process uses it to find the user's file
        self._size = size

    def __call__(self) -> Any:
        made = self.__wrapped__()
        if isinstance(made, LightningDataModule) and not is_overridden("train_dataloader", made):
            made = ModuleLoaders()
        if self._size is not None and isinstance(made, (LightningModule, LightningDataModule)):
            hold_size(made, self._size)
        return made


@final
class ModuleLoaders(LightningDataModule):
    """Return the training loaders of the module. Lightning ignores them if there is a data module."""

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return self.trainer.lightning_module.train_dataloader()


def _attribute(owner: Any) -> list[Any]:
    try:
        value = getattr(owner, NAME)
    except Exception:  # the attribute is missing, or is a property that needs a Trainer
        return []
    return [] if callable(value) else [value]


def _hparams(owner: Any) -> MutableMapping[str, Any]:
    hparams = getattr(owner, "hparams", None)
    return hparams if isinstance(hparams, MutableMapping) and NAME in hparams else {}
