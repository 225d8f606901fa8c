"""Private names of Lightning, each with the reason for it and the condition for its removal."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

# --- Lightning: the precision plugin ----------------------------------------------------------------------------------


# Remove when Lightning makes `Precision._clip_gradients` public.
def run_clipping(plugin: Any, module: Any, optimizer: torch.optim.Optimizer) -> None:
    """Run `configure_gradient_clipping` with the Trainer's settings, as `Precision` does; not in manual mode."""
    trainer = module.trainer
    plugin._clip_gradients(module, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)


# Remove when the Trainer has a public way to call a hook.
def run_hook(module: Any, name: str, *args: Any) -> None:
    """Call a hook of all callbacks, then of the module, under the profiler, as Lightning's `Precision` does."""
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(module.trainer, name, *args)
    call._call_lightning_module_hook(module.trainer, name, *args)


# --- Lightning: evaluation ---
# Lightning evaluates a module inside one loop that owns the results. There is no public way to evaluate a second module
# on the same batches and have `self.log` name, weight and reduce its values. Upstream thread: none known.


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
    from copy import deepcopy

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


def connector_metrics(view: Any, name: str) -> dict[str, Any]:
    """Return `callback_metrics`, `logged_metrics` or `progress_bar_metrics` of the view's own connector.

    The Trainer's own attributes are properties over `_logger_connector`. Remove with `own_results`.
    """
    return getattr(view._logger_connector, name)


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


# Remove with `own_results`.
def evaluation_loader_idx(trainer: Any) -> int | None:
    """Return the index of the current loader; `None` with one, where hooks do not get the argument."""
    results = trainer._results
    return None if results is None else results.dataloader_idx


def evaluation_metrics(trainer: Any) -> dict[str, Tensor]:
    """Return the reduced values that the current evaluation has logged, by their names in `callback_metrics`.

    `callback_metrics` also holds what training logged and what earlier evaluations left. Remove with `own_results`.
    """
    results = trainer._results
    if results is None:
        return {}
    metrics: dict[str, Tensor] = {}
    for item in results.values():
        if item.has_reset or not item.meta.on_epoch or not isinstance(item._computed, Tensor):
            continue
        for name in results._forked_name(item, on_step=False):
            metrics[name] = item._computed.detach()
    return metrics


def evaluation_names(trainer: Any) -> set[str]:
    """Return the names of `evaluation_metrics`, also in the sanity check, which does not reduce them.

    Remove with `own_results`.
    """
    results = trainer._results
    if results is None:
        return set()
    items = [item for item in results.values() if item.meta.on_epoch and not item.has_reset]
    return {name for item in items for name in results._forked_name(item, on_step=False)}


def add_callback_metrics(trainer: Any, metrics: dict[str, Tensor]) -> None:
    """Add values to `trainer.callback_metrics` where `self.log` is not allowed (`on_validation_end`).

    Reading `trainer.callback_metrics` to update it would reduce metrics that the sanity check does not reduce. Remove
    when it does not.
    """
    trainer._logger_connector._callback_metrics.update(metrics)


def log_evaluation_metrics(trainer: Any, metrics: dict[str, Tensor], step: float | None) -> int:
    """Send values to all loggers as Lightning sends evaluation metrics, and return the step that they got.

    The step is a `step` that the user logged, else the private counter of batches after which an optimizer stepped; it
    is not `global_step`. Remove when that counter and the call that adds the epoch are public.
    """
    number = trainer.fit_loop.epoch_loop._batches_that_stepped if step is None else int(step)
    connector = trainer._logger_connector
    # `log_metrics` adds the epoch only if there is no `step`.
    connector.log_metrics(metrics if step is None else {**metrics, "step": torch.tensor(float(number))})
    return number


# Remove when the Trainer has a public way to prepare a batch.
def to_device(trainer: Any, batch: Any, dataloader_idx: int) -> Any:
    """Prepare a batch of an evaluation's loader as the loop does before it calls the step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


@contextmanager
def training_stage(trainer: Any) -> Generator[None]:
    """Put the trainer into its training stage temporarily, during a validation inside the training epoch.

    `self.log` of a training step then finds the results of training. Lightning does the same when it prepares the
    validation loaders. Remove with `own_results`.
    """
    stage = trainer.state.stage
    trainer.training = True
    try:
        yield
    finally:
        trainer.state.stage = stage


# Remove with `run_hook`.
def call_module_hook(module: Any, name: str, *args: Any, run: Callable[..., Any] | None = None) -> Any:
    """Call a hook, and set `_current_fx_name` for it. `self.log` needs that name, and only the Trainer sets it.

    `run`, if given, calls the hook, with the module, its name and the arguments.
    """
    previous = module._current_fx_name
    module._current_fx_name = name
    try:
        return getattr(module, name)(*args) if run is None else run(module, name, *args)
    finally:
        module._current_fx_name = previous


def timeout(strategy: Any) -> timedelta:
    """Return how long the ranks of a strategy wait for each other. Remove when strategies have a public attribute."""
    found = getattr(strategy, "_timeout", None)
    return found if found is not None else timedelta(minutes=30)


def redirected_step(strategy: Any, module: Any, name: str, *args: Any) -> Any:
    """Call a step through the `forward` of the strategy's model, as the strategy does: FSDP1 gathers parameters there.

    Remove when the strategy has a public way that does not enter the plugin's context.
    """
    return strategy._forward_redirection(strategy.model, module, name, *args)


# Remove when Lightning drops the cache in copies.
def forget_metric_names(module: Any) -> None:
    """Drop a copied module's cache of metric names, whose keys are the ids of the original's metrics."""
    from lightning.pytorch import LightningModule

    for child in module.modules():
        if isinstance(child, LightningModule):
            child._metric_attributes = None


def uncompiled_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without the changes of `torch.compile(LightningModule)`.

    Lightning stores compiled functions, bound to the original module, as attributes that hide the methods. Remove when
    `to_uncompiled` works on attributes, rather than on the module itself.
    """
    context = state.get("_compiler_ctx")
    if not context:
        return state
    state = dict(state, _compiler_ctx=None)
    for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
        state[name] = context[f"original_{name}"]
    return state


def is_weight_averaging(callback: Any) -> bool:
    """Return whether a callback is a `WeightAveraging`, which Lightning 2.5 lacks.

    Remove when 2.6 is the oldest supported.
    """
    from lightning.pytorch import callbacks

    base: type | None = getattr(callbacks, "WeightAveraging", None)
    return base is not None and isinstance(callback, base)


def is_lr_finder(callback: Any) -> bool:
    """Return whether a callback records rates and losses for `Tuner.lr_find`. Remove when its class is public."""
    from lightning.pytorch.tuner.lr_finder import _LRCallback

    return isinstance(callback, _LRCallback)


# Remove with `is_lr_finder`.
def without_lr_finder_result(end: Any, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
    """Call `end`, `on_train_batch_end` of an LR finder, and drop its rate and its loss of this batch."""
    finder = end.__self__
    number = len(finder.losses)
    loss = outputs["loss"] if isinstance(outputs, dict) and outputs else outputs
    if isinstance(loss, Tensor) and not loss.isfinite():  # it would be in the moving average of all later losses
        outputs = torch.tensor(finder.avg_loss / (1 - finder.beta**trainer.global_step))
    end(trainer, module, outputs, *batch)
    finder.best_loss = finder.best_loss if number else torch.inf  # its search ends at four times its best loss
    del finder.losses[number:], finder.lrs[number:]


# Remove when the counter is public.
def logging_step(trainer: Any) -> int:
    """Return the step at which Lightning logs training metrics. Its own callbacks read this counter, too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_rank_zero() -> bool:
    """Return whether this process writes files. Remove when type checkers accept `rank_zero_only.rank`."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    return rank_zero_only.rank == 0  # pyright: ignore[reportFunctionMemberAccess]


def optimizer_attributes(trainer: Any, stand_in: Any) -> dict[str, Any]:
    """Return attributes for a view of a strategy in which `stand_in(optimizer)` replaces each optimizer.

    `LightningModule.optimizers()` reads private attributes of the strategy. Remove when that method reads them from the
    Trainer.
    """
    wrapped = trainer.strategy._lightning_optimizers
    return {
        "_lightning_optimizers": [stand_in(optimizer) for optimizer in wrapped],
        "optimizers": [stand_in(optimizer) for optimizer in trainer.strategy.optimizers],
    }


# Remove with `own_results`.
def metric_directions(trainer: Any) -> dict[str, Literal["min", "max"]]:
    """Return whether each torchmetrics metric of the current evaluation is better as `"min"` or `"max"`."""
    from torchmetrics import Metric

    results, found = trainer._results, dict[str, Literal["min", "max"]]()
    if results is None:
        return found
    for item in results.values():
        higher = item.value.higher_is_better if isinstance(item.value, Metric) else None
        if higher is not None and item.meta.on_epoch:
            found.update(dict.fromkeys(results._forked_name(item, on_step=False), "max" if higher else "min"))
    return found


# --- Lightning: half-precision modules, see `precision/_upcast_parameters.py` ---


def loaded_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint that a run resumes from, before the run begins; empty if there is none.

    The plugin's own hook gets it only after `configure_optimizers` and `on_fit_start`, which may have copied the
    weights. Remove when a plugin can change the module before its checkpoint is loaded.
    """
    return trainer._checkpoint_connector._loaded_checkpoint


def set_half_modules_float(module: Any, parameters: Any) -> None:
    """Set `dtype` to float32 in each half-precision Lightning module that holds one of these parameters.

    The public `module.to(dtype)` would convert frozen parameters too. Remove when `dtype` is read from parameters.
    """
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin

    for part in module.modules():
        says_half = isinstance(part, _DeviceDtypeModuleMixin) and part.dtype in (torch.float16, torch.bfloat16)
        if says_half and any(p in parameters for p in part.parameters()):
            part._dtype = torch.float32


def averages(trainer: Any) -> list[tuple[Any, Any]]:
    """Return the copies of the module that averaging callbacks made in `setup`, each with its callback.

    Remove when the copies are public, or are made after the strategy has set up the module.
    """
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    found: list[tuple[Any, Any]] = []
    for callback in trainer.callbacks:
        if is_weight_averaging(callback) or isinstance(callback, StochasticWeightAveraging):
            average = callback._average_model
            if average is not None:
                found.append((callback, average.module if is_weight_averaging(callback) else average))
    return found


# Remove with `averages`.
def weights_beside_averages(checkpoint: dict[str, Any], callbacks: list[Any]) -> dict[str, Any]:
    """Return the weights that training continues with. `WeightAveraging` saves averages in their usual place."""
    averaged = "averaging_state" in checkpoint and any(is_weight_averaging(callback) for callback in callbacks)
    return checkpoint["current_model_state" if averaged else "state_dict"]


# Remove with `averages`.
def load_average(callback: Any, average: Any, checkpoint: dict[str, Any]) -> None:
    """Load an average from a checkpoint as its callback does, but without messages."""
    if is_weight_averaging(callback):
        average.load_state_dict(checkpoint["state_dict"], strict="averaging_state" in checkpoint)
        return
    state = checkpoint.get("callbacks", {}).get(callback.state_key)
    if state is not None and state["average_model_state"] is not None:
        average.load_state_dict(state["average_model_state"])
