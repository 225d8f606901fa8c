"""Private names of Lightning around the values that a shadow logs.

Lightning evaluates a module inside one loop that owns the results. There is no public way to evaluate a second module
on the same batches and have `self.log` name, weight and reduce its values. Upstream thread: none known.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor


def own_results(view: Any, trainer: Any, memo: dict[int, Any]) -> None:
    """Give a view of the trainer its own result collection and logger connector.

    `LightningModule.log` writes to `trainer._results` and `trainer._logger_connector`. With its own pair, a copy of a
    module logs with Lightning's naming, batch-size weighting and reduction, and leaves the trainer alone. Remove when
    Lightning offers a result collection that a callback may create and read.

    Args:
        view: Stands in for the trainer, and gets the attributes.
        trainer: The real trainer. Its results of this evaluation so far are copied.
        memo: The memo of the module's deep copy, so that the copied results refer to the copy's metric objects.

    """
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

    real = trainer._results
    results = _ResultCollection(training=real is not None and real.training)
    if real is not None:
        results.dataloader_idx = real.dataloader_idx
        for key, item in real.items():
            if item.has_reset:  # attributes from an earlier evaluation
                continue
            if item.meta.sync.group is not None:
                memo[id(item.meta.sync.group)] = item.meta.sync.group
            memo[id(item.meta.sync.fn)] = view.strategy.reduce
            results[key] = copied = deepcopy(item, memo)
            sync = item.meta.sync
            copied.meta.sync = type(sync)(view.strategy.reduce, sync.should, sync.rank_zero_only, sync.op, sync.group)
    connector = _LoggerConnector(view)
    theirs = trainer._logger_connector
    connector._callback_metrics = dict(theirs._callback_metrics)
    connector._logged_metrics = dict(theirs._logged_metrics)
    connector._progress_bar_metrics = dict(theirs._progress_bar_metrics)
    connector._current_fx = theirs._current_fx
    view._results = results
    view._logger_connector = connector
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        view.compute(name, lambda name=name: getattr(connector, name))


def start_evaluation_batch(view: Any, batch: Any, dataloader_idx: int | None) -> None:
    """Set the next batch in the view's results, as the evaluation loop does. Remove with `own_results`."""
    view._logger_connector.on_batch_start(batch, dataloader_idx)


def finish_evaluation_batch(view: Any) -> None:
    """Drop the reference to the batch.

    Values logged per step stay, but no code reads them. Remove with `own_results`.
    """
    view._results.batch = None
    view._results.batch_size = None


# Remove with `own_results`.
def finish_evaluation_loader(view: Any) -> dict[str, Tensor]:
    """Reduce what was logged for the current loader, as `_EvaluationLoop._store_dataloader_outputs` does."""
    connector = view._logger_connector
    connector.epoch_end_reached()
    connector.update_eval_epoch_metrics()
    return dict(connector.metrics["callback"])


def start_evaluation_epoch_end(view: Any) -> None:
    """Do what the loop does between the last loader and `on_*_epoch_end`. Remove with `own_results`."""
    view._logger_connector.epoch_end_reached()
    view._logger_connector._evaluation_epoch_end()


def finish_evaluation_epoch_end(view: Any) -> dict[str, Tensor]:
    """Do what the loop does after `on_*_epoch_end`.

    Return the values logged in that hook. Remove with `own_results`.
    """
    connector = view._logger_connector
    connector.on_epoch_end()
    connector.update_eval_epoch_metrics()
    return dict(connector.metrics["callback"])


def forget_results(view: Any) -> None:
    """Clear the results of a view of the trainer, as before the first batch. Remove with `own_results`."""
    view._results.clear()
    view._logger_connector._callback_metrics.clear()
