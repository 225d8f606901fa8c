"""Private names of Lightning around logged evaluation metrics; `_lightning.own_results` explains why."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import final


@final
class LoggedSum(NamedTuple):
    """The running sum of a metric of the current loader. Remove with `logged_sums`."""

    value: Tensor
    """The sum over batches on the device; for a maximum or minimum the value itself."""
    weight: Tensor | None
    """The number of rows, by which the sum is divided in the end. `None` for sums, maxima and minima."""
    adds_up: bool


def logged_sums(trainer: Any, dataloader_idx: int | None) -> dict[str, LoggedSum]:
    """Return the running sums of the plain values that a loader has logged, by their names at the epoch's end.

    Each `self.log` replaces the tensors instead of changing them, so a caller can keep them without a copy. Remove when
    Lightning offers a result collection that a callback may read.
    """
    results = trainer._results
    if results is None:
        return {}
    sums: dict[str, LoggedSum] = {}
    for item in results.values():
        if item.has_reset or not item.meta.on_epoch or not item.is_tensor:
            continue
        if item.meta.dataloader_idx not in (None, dataloader_idx):
            continue
        weight = item.cumulated_batch_size if item.meta.is_mean_reduction else None
        adds_up = item.meta.is_mean_reduction or item.meta.is_sum_reduction
        for name in results._forked_name(item, on_step=False):
            sums[name] = LoggedSum(item.value, weight, adds_up)
    return sums


def forget_results(view: Any) -> None:
    """Clear the results of a view of the trainer, as before the first batch. Remove with `logged_sums`."""
    view._results.clear()
    view._logger_connector._callback_metrics.clear()
