"""Keep the batches since the last attempted step, for running them again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _modules
from lightning_amp._containers import tensors_in
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.tracing import RandomState

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
        self._first: int | None = None
        self._num_bytes = 0
        self._must_copy = False

    def __bool__(self) -> bool:
        return bool(self.kept)

    @property
    def span(self) -> tuple[int, int]:
        """Return the indices of the first and the last batch, kept or not."""
        last = self.kept[-1].batch_idx
        return (last if self._first is None else self._first), last

    def add(self, batch: Any, batch_idx: int, device_type: str) -> None:
        """Keep a batch before its step."""
        self._detect_edits()
        if self._first is None:
            self._first = batch_idx
        self.kept.append(KeptBatch.keep(batch, batch_idx, device_type, copy=self._must_copy))
        self._num_bytes += self.kept[-1].num_bytes
        while self._num_bytes > _WINDOW_BYTES and len(self.kept) > 1:
            self._num_bytes -= self.kept.popleft().num_bytes

    def clear(self) -> None:
        """Drop the batches, because a step was attempted."""
        self._detect_edits()
        self.kept.clear()
        self._first, self._num_bytes = None, 0

    def _detect_edits(self) -> None:
        if self.kept and not self.kept[-1].is_intact:
            self._must_copy = True
