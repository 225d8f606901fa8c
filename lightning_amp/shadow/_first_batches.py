"""The first batches of each loader of an evaluation, kept for running them again."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _evaluation, _modules
from lightning_amp._containers import tensors_in
from lightning_amp.findings import LOADER_SUFFIX
from lightning_amp.shadow._module_copy import copy_batch
from lightning_amp.tracing import RandomState

_Sums = dict[str, _evaluation.LoggedSum]
"""By metric."""

MAX_BYTES = 2**28
"""What kept batches may hold in memory, over all loaders."""


@final
@dataclass(slots=True)
class FirstBatch:
    """A batch as the step got it, and the random generators before its step."""

    batch: Any
    batch_idx: int
    loader_idx: int | None
    random_state: RandomState
    versions: list[tuple[Tensor, int]]

    @property
    def is_intact(self) -> bool:
        """Return whether nobody has changed it in place since, as far as that can be known."""
        return all(_modules.version(tensor) == version for tensor, version in self.versions)


@final
class FirstBatches:
    """Keeps references, and what had been logged after each batch, kept or not.

    Copies, once a step was seen to edit its batch in place.

    Costs no operation on the device, and the random generators' states of the kept batches (30 us each).

    Attributes:
        kept: The batches.

    """

    def __init__(self, device_type: str, num_loaders: int) -> None:
        self.kept: list[FirstBatch] = []
        self._device_type = device_type
        self._share = MAX_BYTES / max(num_loaders, 1)
        self._loader_idx: int | None = None
        self._num_bytes = 0
        self._num_rows: dict[int | None, int] = {}
        self._is_full = self._must_copy = False
        self._sums: dict[int | None, list[tuple[_Sums, _Sums]]] = {}

    def add(self, batch: Any, batch_idx: int, loader_idx: int | None) -> None:
        """Take note of a batch whose steps are about to run."""
        if loader_idx != self._loader_idx:
            self._loader_idx, self._num_bytes, self._is_full = loader_idx, 0, False
        tensors = [tensor for _, tensor in tensors_in(batch)]
        rows = max((t.shape[0] for t in tensors if t.ndim), default=1)
        self._num_rows[loader_idx] = self._num_rows.get(loader_idx, 0) + rows
        self._num_bytes += sum(t.numel() * t.element_size() for t in tensors)
        # The first of a loader in any case.
        self._is_full = self._is_full or (self._num_bytes > self._share and batch_idx > 0)
        if not self._is_full:
            self._must_copy = self._must_copy or bool(self.kept and not self.kept[-1].is_intact)
            if self._must_copy:
                batch = copy_batch(batch)
            versions = [(t, _modules.version(t)) for _, t in tensors_in(batch) if not t.is_inference()]
            state = RandomState.capture(self._device_type)
            self.kept.append(FirstBatch(batch, batch_idx, loader_idx, state, versions))

    def note_sums(self, amp: Any, fp32: Any) -> None:
        """Take note of what two trainers, or views of one, have logged after the last batch that was added."""
        idx = self._loader_idx
        self._sums.setdefault(idx, []).append((_evaluation.logged_sums(amp, idx), _evaluation.logged_sums(fp32, idx)))

    def num_rows_of(self, metric: str) -> int | None:
        """Return over how many rows a metric was taken; `None` if it cannot be a share or a count of them.

        What a step logs as a plain value is one if it adds up to whole numbers in each batch; what torchmetrics
        computed, or the end of the epoch, or a single batch, may always be one. Waits for the device.
        """
        loader = metric.partition(LOADER_SUFFIX)[2]
        logged = [side[metric] for sums in self._sums.values() for both in sums for side in both if metric in side]
        if len(logged) > 2 and not all(_is_whole(float(one.value)) for one in logged):  # more than one batch of each
            return None
        number = self._num_rows.get(int(loader)) if loader.isdigit() else None
        return number or sum(self._num_rows.values())

    def standard_error(self, metric: str) -> float:
        """Return that of a plain value in fp32, from what differs between its batches. Waits for the device."""
        fp32 = [value for _, value in self.values(metric).values() if math.isfinite(value)]
        return statistics.stdev(fp32) / math.sqrt(len(fp32)) if len(fp32) > 1 else 0.0

    def values(self, metric: str) -> dict[tuple[int | None, int], tuple[float, float]]:
        """Return a metric in AMP and fp32 by loader and batch, where it is a plain value. Waits for the device."""
        found: dict[tuple[int | None, int], tuple[float, float]] = {}
        for loader_idx, sums in self._sums.items():
            before: tuple[_evaluation.LoggedSum | None, _evaluation.LoggedSum | None] = None, None
            for batch_idx, (amp, fp32) in enumerate(sums):
                if metric not in amp or metric not in fp32:
                    continue
                found[loader_idx, batch_idx] = _of_batch(before[0], amp[metric]), _of_batch(before[1], fp32[metric])
                before = amp[metric], fp32[metric]
        return found


def _is_whole(value: float) -> bool:
    return not math.isfinite(value) or abs(value - round(value)) < 1e-3


def _of_batch(before: _evaluation.LoggedSum | None, after: _evaluation.LoggedSum) -> float:
    value, weight = after.value, after.weight
    if before is not None and after.adds_up:
        value = value - before.value
        if weight is not None and before.weight is not None:
            weight = weight - before.weight
    return float(value if weight is None else value / weight)
