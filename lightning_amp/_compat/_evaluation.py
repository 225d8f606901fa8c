"""Private names of Lightning around what an evaluation has logged so far; `_lightning.own_results` explains why."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import final


@final
class LoggedSum(NamedTuple):
    """What a metric of the current loader adds up to after some batches. Can go with `logged_sums`."""

    value: Tensor
    """The sum over batches; of a maximum or minimum the value itself. On the device."""
    weight: Tensor | None
    """What it is divided by in the end: rows. `None` for sums, maxima and minima."""
    adds_up: bool


def logged_sums(trainer: Any, dataloader_idx: int | None) -> dict[str, LoggedSum]:
    """Return the running sums of the plain values that a loader has logged, by their epoch's names.

    Each `self.log` puts new tensors in their place, so that keeping these costs no operation. Can go when Lightning
    offers a result collection that a callback may read.
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
    """Empty the results of a view of the trainer, as before the first batch. Can go with `logged_sums`."""
    view._results.clear()
    view._logger_connector._callback_metrics.clear()
