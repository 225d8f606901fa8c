"""The batches since the last attempted step."""

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
"""What the batches of an accumulation window may take in memory; of a larger one the first are forgotten."""


@final
@dataclass(slots=True)
class KeptBatch:
    """A batch, and the random generators before its step."""

    batch: Any
    batch_idx: int
    random_state: RandomState
    versions: list[tuple[Tensor, int]]
    num_bytes: int
    edited: bool = False

    def detect_edits(self, was_copied: bool) -> bool:
        """Return whether its step, which has run, changed it in place."""
        changed = any(_modules.version(tensor) != version for tensor, version in self.versions)
        self.edited = changed and not was_copied
        self.versions = []
        return changed


@final
class BatchWindow:
    """The batches since the last attempted step.

    Keeps references. Once a batch was found to be edited in place by its step, copies.
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
        """Keep a batch on which a step is about to run."""
        tensors = [tensor for _, tensor in tensors_in(batch)]
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        versions = [(t, _modules.version(t)) for t in tensors if not t.is_inference()]
        kept = copy_batch(batch) if self._must_copy else batch
        if self._first is None:
            self._first = batch_idx
        self.kept.append(KeptBatch(kept, batch_idx, RandomState.capture(device_type), versions, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > _WINDOW_BYTES and len(self.kept) > 1:
            self._num_bytes -= self.kept.popleft().num_bytes

    def detect_edits(self) -> None:
        """Look whether the step on the last batch, which has run, changed it in place."""
        if self.kept and self.kept[-1].detect_edits(was_copied=self._must_copy):
            self._must_copy = True

    def clear(self) -> None:
        """Forget the batches: a step was attempted."""
        self.kept.clear()
        self._first, self._num_bytes = None, 0
