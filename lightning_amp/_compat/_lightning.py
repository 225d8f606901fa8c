"""Private names of Lightning, each with the reason for it and the condition for its removal."""

from __future__ import annotations

from collections.abc import Iterator
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
    from lightning_amp._compat._names import call

    call._call_callback_hooks(module.trainer, name, *args)
    call._call_lightning_module_hook(module.trainer, name, *args)


# --- Lightning: evaluation; see also `shadow/_shadow.py` ---


# Remove with `evaluation_metrics`.
def evaluation_loader_idx(trainer: Any) -> int | None:
    """Return the index of the current loader; `None` with one, where hooks do not get the argument."""
    results = trainer._results
    return None if results is None else results.dataloader_idx


def _epoch_values(trainer: Any) -> Iterator[tuple[Any, list[str]]]:
    """Find the values that the current evaluation reduces over its epoch, with their names in `callback_metrics`."""
    results: Any = trainer._results or {}
    for item in results.values():
        if item.meta.on_epoch:
            yield item, results._forked_name(item, on_step=False)


def evaluation_metrics(trainer: Any) -> dict[str, Tensor]:
    """Return the reduced values that the current evaluation has logged, by their names in `callback_metrics`.

    `callback_metrics` also holds what training logged and what earlier evaluations left. Remove when Lightning offers a
    result collection that a callback may read.
    """
    metrics: dict[str, Tensor] = {}
    for item, names in _epoch_values(trainer):
        if not item.has_reset and isinstance(item._computed, Tensor):
            metrics.update(dict.fromkeys(names, item._computed.detach()))
    return metrics


def is_weight_averaging(callback: Any) -> bool:
    """Return whether a callback is a `WeightAveraging`, which Lightning 2.5 lacks.

    Remove when 2.6 is the oldest supported.
    """
    from lightning_amp._compat._names import callbacks

    base: type | None = getattr(callbacks, "WeightAveraging", None)
    return base is not None and isinstance(callback, base)


def is_lr_finder(callback: Any) -> bool:
    """Return whether a callback records rates and losses for `Tuner.lr_find`. Remove when its class is public."""
    from lightning_amp._compat._names import _LRCallback

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


def is_rank_zero() -> bool:
    """Return whether this process writes files. Remove when type checkers accept `rank_zero_only.rank`."""
    from lightning_amp._compat._names import rank_zero_only

    return rank_zero_only.rank == 0  # pyright: ignore[reportFunctionMemberAccess]


# Remove with `evaluation_metrics`.
def metric_directions(trainer: Any) -> dict[str, Literal["min", "max"]]:
    """Return whether each torchmetrics metric of the current evaluation is better as `"min"` or `"max"`."""
    from torchmetrics import Metric

    found = dict[str, Literal["min", "max"]]()
    for item, names in _epoch_values(trainer):
        higher = item.value.higher_is_better if isinstance(item.value, Metric) else None
        if higher is not None:
            found.update(dict.fromkeys(names, "max" if higher else "min"))
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
    from lightning_amp._compat._names import _DeviceDtypeModuleMixin

    for part in module.modules():
        says_half = isinstance(part, _DeviceDtypeModuleMixin) and part.dtype in (torch.float16, torch.bfloat16)
        if says_half and any(p in parameters for p in part.parameters()):
            part._dtype = torch.float32


def averages(trainer: Any) -> list[tuple[Any, Any]]:
    """Return the copies of the module that averaging callbacks made in `setup`, each with its callback.

    Remove when the copies are public, or are made after the strategy has set up the module.
    """
    from lightning_amp._compat._names import StochasticWeightAveraging

    callbacks = [c for c in trainer.callbacks if is_weight_averaging(c) or isinstance(c, StochasticWeightAveraging)]
    pairs = [(callback, callback._average_model) for callback in callbacks if callback._average_model is not None]
    return [(callback, average.module if is_weight_averaging(callback) else average) for callback, average in pairs]


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
