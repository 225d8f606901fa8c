"""Keep batches, so that a step can run again. Some are kept until the next step, some for later private fits."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._compat._names import LightningDataModule, LightningModule, Trainer, is_overridden
from lightning_amp._containers import tensors_in
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.tracing import RandomState

_HOOK = "on_before_batch_transfer"
_WINDOW_BYTES = 2**28
"""Memory for the batches of an accumulation window; a larger window loses its first batches."""


@final
@dataclass(frozen=True, slots=True)
class KeptBatch:
    """A batch as passed to the step, or a copy, and the states of the random generators before the step."""

    batch: Any
    batch_idx: int
    loader_idx: int | None
    random_state: RandomState
    versions: list[tuple[Tensor, int]]  # the tensors of the batch, and how often each had been changed in place
    num_bytes: int

    @classmethod
    def keep(
        cls, batch: Any, batch_idx: int, device_type: str, *, copy: bool, loader_idx: int | None = None
    ) -> KeptBatch:
        """Keep a batch before its step (30 us, for the random generators)."""
        batch = copy_batch(batch) if copy else batch
        num_bytes = sum(t.numel() * t.element_size() for _, t in tensors_in(batch))
        versions = [(t, _modules.version(t)) for _, t in tensors_in(batch) if not t.is_inference()]
        return cls(batch, batch_idx, loader_idx, RandomState.capture(device_type), versions, num_bytes)

    @property
    def is_intact(self) -> bool:
        """Return whether no code has changed the kept tensors in place since, as far as torch can tell."""
        return all(_modules.version(tensor) == version for tensor, version in self.versions)


@final
class BatchWindow:
    """The batches since the last attempted step.

    It keeps references. Once a step has edited its batch in place, the window keeps copies.
    """

    def __init__(self) -> None:
        self.kept: deque[KeptBatch] = deque()
        self._first = 0
        self._must_copy = False

    def __bool__(self) -> bool:
        return bool(self.kept)

    @property
    def span(self) -> tuple[int, int]:
        """Return the indices of the first and the last batch, kept or not."""
        return self._first, self.kept[-1].batch_idx

    def add(self, batch: Any, batch_idx: int, device_type: str) -> None:
        """Keep a batch before its step."""
        self._detect_edits()
        if not self.kept:
            self._first = batch_idx
        self.kept.append(KeptBatch.keep(batch, batch_idx, device_type, copy=self._must_copy))
        while len(self.kept) > 1 and sum(one.num_bytes for one in self.kept) > _WINDOW_BYTES:
            self.kept.popleft()

    def clear(self) -> None:
        """Drop the batches, because a step was attempted."""
        self._detect_edits()
        self.kept.clear()

    def _detect_edits(self) -> None:
        if self.kept and not self.kept[-1].is_intact:
            self._must_copy = True


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

    patch = mock.patch.object(owner, _HOOK, hook)
    patch.start()
    return patch.stop


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
    own: dict[str, Any] = dict.fromkeys(("prepare_data", "setup", "teardown"), lambda *_, **__: None)
    own.update(train_dataloader=lambda: training, val_dataloader=lambda: validation or [])
    with mock.patch.dict(vars(data), own):
        yield {"data": data}
