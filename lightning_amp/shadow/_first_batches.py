"""Keep the first batches of each loader of an evaluation, for running them again."""

from __future__ import annotations

import math
import statistics
from typing import Any

from typing_extensions import final

from lightning_amp._containers import tensors_in
from lightning_amp.findings import LOADER_SUFFIX
from lightning_amp.shadow._batch_window import KeptBatch, num_bytes_of
from lightning_amp.shadow._own_results import LoggedSum, logged_sums

_Sums = dict[str, LoggedSum]
"""By metric."""

MAX_BYTES = 2**28
"""Memory for the kept batches of all loaders."""


@final
class FirstBatches:
    """Keeps the first batches of each loader, and the logged values after each batch, kept or not.

    It keeps references; once a step has edited its batch in place, this object keeps copies.

    Cost: no operation on the device; some 30 us for each kept batch.

    """

    def __init__(self, device_type: str, num_loaders: int) -> None:
        self.kept: list[KeptBatch] = []
        self.why_none = ""
        self._device_type = device_type
        self._share = MAX_BYTES / max(num_loaders, 1)
        self._loader_idx: int | None = None
        self._num_bytes = 0
        self._num_rows: dict[int | None, int] = {}
        self._is_full = self._must_copy = False
        self._sums: dict[int | None, list[tuple[_Sums, _Sums]]] = {}

    def add(self, batch: Any, batch_idx: int, loader_idx: int | None) -> None:
        """Count a batch before its steps, and keep it if there is enough memory."""
        if loader_idx != self._loader_idx:
            self._loader_idx, self._num_bytes, self._is_full = loader_idx, 0, False
        rows = max((t.shape[0] for _, t in tensors_in(batch) if t.ndim), default=1)
        self._num_rows[loader_idx] = self._num_rows.get(loader_idx, 0) + rows
        self._num_bytes += num_bytes_of(batch)
        # The first batch of a loader is always kept.
        self._is_full = self._is_full or (self._num_bytes > self._share and batch_idx > 0)
        if not self._is_full:
            self._must_copy = self._must_copy or bool(self.kept and not self.kept[-1].is_intact)
            kept = KeptBatch.keep(batch, batch_idx, self._device_type, copy=self._must_copy, loader_idx=loader_idx)
            self.kept.append(kept)

    def forget(self, why: str) -> None:
        """Free the batches, because they cannot be run again; `why_none` keeps the reason for a report."""
        self.kept.clear()
        self.why_none = why

    def note_sums(self, amp: Any, fp32: Any) -> None:
        """Record the values that two trainers, or views of one, have logged since the last batch was added."""
        idx = self._loader_idx
        self._sums.setdefault(idx, []).append((logged_sums(amp, idx), logged_sums(fp32, idx)))

    def num_rows_of(self, metric: str) -> int | None:
        """Return the number of rows behind a metric; `None` if it cannot be a share or a count of them.

        A plain value that a step logs can only be a share or a count if it adds up to whole numbers in each batch. A
        torchmetrics metric, a value logged at the end of the epoch, or a metric of a single batch may always be one.
        This waits for the device.
        """
        loader = metric.partition(LOADER_SUFFIX)[2]
        logged = [side[metric] for sums in self._sums.values() for both in sums for side in both if metric in side]
        # more than one batch of each loader
        if len(logged) > 2 and not all(_is_whole(float(one.value)) for one in logged):
            return None
        number = self._num_rows.get(int(loader)) if loader.isdigit() else None
        return number or sum(self._num_rows.values())

    def standard_error(self, metric: str) -> float:
        """Return the standard error of a plain value, from its fp32 values by batch. This waits for the device."""
        fp32 = [value for _, value in self.values(metric).values() if math.isfinite(value)]
        return statistics.stdev(fp32) / math.sqrt(len(fp32)) if len(fp32) > 1 else 0.0

    def values(self, metric: str) -> dict[tuple[int | None, int], tuple[float, float]]:
        """Return a metric in AMP and in fp32, by loader and batch; empty unless it is a plain value.

        This waits for the device.
        """
        found: dict[tuple[int | None, int], tuple[float, float]] = {}
        for loader_idx, sums in self._sums.items():
            before: tuple[LoggedSum | None, LoggedSum | None] = None, None
            for batch_idx, (amp, fp32) in enumerate(sums):
                if metric not in amp or metric not in fp32:
                    continue
                found[loader_idx, batch_idx] = _of_batch(before[0], amp[metric]), _of_batch(before[1], fp32[metric])
                before = amp[metric], fp32[metric]
        return found


def _is_whole(value: float) -> bool:
    return not math.isfinite(value) or abs(value - round(value)) < 1e-3


def _of_batch(before: LoggedSum | None, after: LoggedSum) -> float:
    value, weight = after.value, after.weight
    if before is not None and after.adds_up:
        value = value - before.value
        if weight is not None and before.weight is not None:
            weight = weight - before.weight
    return float(value if weight is None else value / weight)
