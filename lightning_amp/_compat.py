"""Every private name of torch or Lightning that this package touches, and why.

Each entry says why there is no public way, names the upstream thread if there is one, and the condition under which the
entry can go. `tests/contract/test_architecture.py` proves that no other file uses a private name.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from typing import Any

import torch
import torch.optim.optimizer as _optimizer_module
import torch.utils.checkpoint as _checkpoint_module
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue, reportMissingModuleSource]
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# --- torch: foreach and amp kernels ----------------------------------------------------------------------------------
# The multi-tensor kernels that `GradScaler` and `torch.optim` run on are private; their public wrappers
# (`GradScaler.unscale_`, `clip_grad_norm_`) cannot express complex gradients, two steps in a batch, or a check alone.
# Can go when torch makes `torch._foreach_*` public.


# (grads, found_inf, factor): multiplies by `factor` [] in place and sets `found_inf` [] to 1.0 if a value was not
# finite before; one device. Not a function of ours, since it is called in every step.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def foreach_mul_(grads: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors by `factor` in place."""
    torch._foreach_mul_(grads, factor)


def foreach_norm(grads: list[Tensor], order: float) -> list[Tensor]:
    """The vector norm of each tensor, each of shape []."""
    return list(torch._foreach_norm(grads, order))


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy `sources` into `targets` with one launch per dtype."""
    torch._foreach_copy_(targets, sources)


def sparse_values(grad: Tensor) -> Tensor:
    """The values of a sparse gradient without coalescing it first, as `GradScaler` takes them."""
    return grad._values()


# --- torch: GradScaler -----------------------------------------------------------------------------------------------
# `GradScaler` has no public way to read or set its scale without waiting for the device (`get_scale` is an `.item()`),
# nor to be told a found_inf flag from outside. Can go when torch offers an asynchronous getter and setter.


def scale_tensor(scaler: torch.amp.GradScaler, device: torch.device | None = None) -> Tensor:
    """The scale, shape [], made on `device` if the scaler has not been used yet."""
    scale = scaler._scale
    if scale is None:
        scaler._lazy_init_scale_growth_tracker(device or torch.device(scaler._device))
        scale = scaler._scale
    assert scale is not None
    return scale


def growth_tracker(scaler: torch.amp.GradScaler) -> Tensor:
    """Clean steps in a row, int32, shape []."""
    tracker = scaler._growth_tracker
    assert tracker is not None  # made together with the scale
    return tracker


GROWTH_TRACKER = "_growth_tracker"
"""Where a `GradScaler.state_dict` keeps the clean steps in a row; the key has no public name."""


def set_scale_tensor(scaler: torch.amp.GradScaler, scale: Tensor, tracker: Tensor | None = None) -> None:
    """Put new tensors in place of the scale (and the growth tracker)."""
    scaler._scale = scale
    if tracker is not None:
        scaler._growth_tracker = tracker


def reset_scale(scaler: torch.amp.GradScaler, scale: float, tracker: int = 0) -> None:
    """Back to the state before first use, with this scale."""
    scaler._init_scale, scaler._init_growth_tracker = scale, tracker
    scaler._scale = scaler._growth_tracker = None
    scaler._per_optimizer_states = _no_optimizer_states()


def set_scaler_device(scaler: torch.amp.GradScaler, device_type: str) -> None:
    """`GradScaler` takes its device type only at construction, before a Trainer knows it."""
    scaler._device = device_type


def take_found_infs(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """The flags recorded since the last update; forgets them, as `GradScaler.update` does."""
    states = scaler._per_optimizer_states
    scaler._per_optimizer_states = _no_optimizer_states()
    return [flag for state in states.values() for flag in state["found_inf_per_device"].values()]


def give_found_inf(scaler: torch.amp.GradScaler, found_inf: Tensor) -> None:
    """Tell somebody else's scaler what we found, so that its own `update` can be called."""
    scaler._per_optimizer_states = _no_optimizer_states()
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {found_inf.device: found_inf}


def optimizer_state(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a scaler knows of an optimizer until its next update, to keep a note there that is forgotten then."""
    return scaler._per_optimizer_states[id(optimizer)]


def _no_optimizer_states() -> Any:
    return defaultdict(torch.amp.grad_scaler._refresh_per_optimizer_state)


def amp_update_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Torch's own update kernel, so that the default policy equals torch's to the bit. In place; private in torch."""
    torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)


# --- torch: autograd -------------------------------------------------------------------------------------------------

_unsafe_view = torch.ops.aten._unsafe_view.default


def cast_to(parameter: Tensor, copy: Tensor) -> Tensor:
    """What `parameter.to(copy.dtype)` returns to autograd, without computing it: the values of `copy` are taken.

    The result has a node of its own, whose gradient autograd casts to the parameter's dtype, as that of a cast. A
    custom `autograd.Function` does the same in Python, and takes longer than casting a small weight. The node is made
    by the one operation that has the identity as its derivative, moves no data and is not a view: a view would share
    the parameter's version counter, and an optimizer step between forward and backward would be an error. Can go when
    torch offers a cast into memory that is given.
    """
    alias = _unsafe_view(parameter, parameter.shape)
    alias.data = copy
    return alias


# --- torch: optimizers -----------------------------------------------------------------------------------------------
# Fused optimizers skip inside their kernel, told by two attributes. This is the protocol that `GradScaler.step` uses;
# it has no public form. Can go when torch gives `Optimizer.step` arguments for them.

_FUSED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` of this optimizer reads `found_inf` and `grad_scale` on the device, after its closure.

    Only torch's own classes are taken at their word: somebody else's fused optimizer may read them before.
    """
    return isinstance(optimizer, _FUSED_CLASSES) and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Lightning's own plugin leaves unscaling to this optimizer; it asks for the same attribute."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether such an optimizer still is: a checkpoint brings the `fused` of the run that wrote it."""
    return all(group["fused"] for group in optimizer.param_groups)


def set_found_inf(optimizer: Any, found_inf: Tensor) -> None:
    """Hand the flag to a fused optimizer. The kernels test `found_inf == 1`: any other value steps."""
    optimizer.found_inf = found_inf


def set_grad_scale(optimizer: Any, grad_scale: Tensor | None) -> None:
    """Hand a fused optimizer what to divide gradients by."""
    optimizer.grad_scale = grad_scale


def clear_amp_attributes(optimizer: Any) -> None:
    """Undo both."""
    attributes = vars(optimizer)
    attributes.pop("found_inf", None)
    attributes.pop("grad_scale", None)


def momentum_is_uninitialised(optimizer: torch.optim.SGD) -> bool:
    """Whether a skipped first step would leave garbage in a fused SGD's momentum.

    torch 2.13 allocates `momentum_buffer` with `empty_like` and fills it inside the kernel, which does not run on a
    skip (`torch/optim/sgd.py`, `_fused_sgd`). Found by this project; can go when torch fills it before.
    """
    return any(
        group["momentum"] != 0 and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anybody registered a hook around `step`, on this optimizer or on all; one that `only_looks` is none."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    for hooks in (_optimizer_module._global_optimizer_pre_hooks, _optimizer_module._global_optimizer_post_hooks):
        for hook in hooks.values():
            if not getattr(hook, "only_looks", False):
                return True
    return False


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The user's optimizer behind a `LightningOptimizer` (its `.optimizer` property is public)."""
    if not type(optimizer).__name__.startswith("Lightning"):  # saves an import on the step path
        return optimizer
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


# --- torch: modules and tensors --------------------------------------------------------------------------------------


def norm_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All normalisation layers that keep running statistics; their common base class is private."""
    from torch.nn.modules.batchnorm import _NormBase

    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """The dictionary in which a module looks up its own parameters.

    `functional_call` puts tensors into it one by one, with checks and a search for ties; nothing public puts another
    dictionary in its place for the length of a call.
    """
    return vars(module)["_parameters"]


def set_own_parameters(module: torch.nn.Module, parameters: dict[str, Any]) -> None:
    """Put another dictionary there."""
    vars(module)["_parameters"] = parameters


def is_transformed_or_traced() -> bool:
    """Whether a `torch.func` transform or `torch.jit.trace` is looking: neither takes a plain `autograd.Function`.

    Can go when there is a public question for the first; for the second there is one, ten times as slow.
    """
    return torch._C._are_functorch_transforms_active() or bool(torch._C._get_tracing_state())


_REPLAYING = (_checkpoint_module._CachingTorchDispatchMode, _checkpoint_module._CachedTorchDispatchMode)


def is_replayed() -> bool:
    """Whether selective activation checkpointing notes operations, or plays them back in the backward.

    Both times must run the same ones, one by one. Its two modes have no public names. Can go when there is a public
    question for them, or when operations can be hidden from it.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(m, _REPLAYING) for m in _get_current_dispatch_mode_stack())


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of this module are compiled, by any of torch's and Lightning's ways, or scripted."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: nothing is compiled
    return (
        (dynamo is not None and isinstance(module, dynamo.OptimizedModule))
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or getattr(module, "_compiler_ctx", None) is not None
        or hasattr(getattr(type(module), "forward", None), "_torchdynamo_orig_callable")
    )


def constant_while_compiling(function: Any) -> Any:
    """Let `torch.compile` call a function while it traces, and not again: it leaves no trace in the graph.

    What `torch.compiler.assume_constant_result` does; that one imports the whole compiler. Can go when it does not.
    """
    function._dynamo_marked_constant = True
    return function


def buffer_names(module: torch.nn.Module) -> list[str]:
    """The names of a module's own buffers. `named_buffers` leaves out those that are `None` as yet; no public way."""
    return list(module._buffers)


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; autograd's counter, which has no public name."""
    return tensor._version


def reduce_as(instance: Any, base: type) -> Any:
    """Pickle (and copy) an instance whose class we swapped as one of its own class, so that no pickle needs us."""
    import copyreg

    return copyreg._reconstructor, (base, object, None), dict(vars(instance))  # pyright: ignore[reportAttributeAccessIssue]


def fsdp_mixed_precision(reduce_dtype: torch.dtype | None) -> Any:
    """FSDP1's `MixedPrecision` that only says what gradients are reduced in.

    With a wrapping policy FSDP1 puts each BatchNorm into a unit of its own, with a warning, as soon as there is a
    `MixedPrecision`: half-precision parameters would break it. Ours stay as they are, so it need not; the field that
    says so is private. Can go when FSDP1 looks at `param_dtype` before.
    """
    from torch.distributed.fsdp import MixedPrecision

    return MixedPrecision(
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=(),
    )


class CompiledBackwardWithoutAutocast:
    """While it is on, `torch.compile` traces backwards outside autocast, as eager runs them. For the length of a fit.

    By default the compiled backward runs under the forward's autocast, so gradients of fp32 regions are half precision
    (pytorch/pytorch#153044). The switch is private; can go when its default changes.
    """

    def __init__(self) -> None:
        from torch._functorch import config

        supported = hasattr(config, "backward_pass_autocast")
        self._patch = config.patch(backward_pass_autocast="off") if supported else contextlib.nullcontext()
        self._on = False

    def start(self) -> None:
        """Switch it on."""
        if not self._on:
            self._patch.__enter__()
            self._on = True

    def stop(self) -> None:
        """Put the switch back."""
        if self._on:
            self._patch.__exit__(None, None, None)
            self._on = False


# --- torch: torch.func ---
# Inside `vmap` or `grad` a hook sees wrapped tensors: what it computes from them stays inside of the transform, and a
# hook on one cannot run. There is no public way to the tensor behind them. Can go when module and tensor hooks are
# called outside of transforms.


def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """Compute as if no transform of `torch.func` was under way."""
    if _functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()  # pyright: ignore[reportReturnType]


def behind_transforms(tensor: Tensor) -> Tensor:
    """The tensor that holds the values: of a batch inside `vmap` all of them."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


# --- Lightning: the precision plugin ----------------------------------------------------------------------------------


def run_clipping(plugin: Any, module: Any, optimizer: torch.optim.Optimizer) -> None:
    """`configure_gradient_clipping` with the Trainer's settings, as `Precision` runs it; none in manual optimization.

    Private; can go when Lightning makes it public.
    """
    trainer = module.trainer
    plugin._clip_gradients(module, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)


def run_hook(module: Any, name: str, *args: Any) -> None:
    """Call a hook of all callbacks, then of the module, under the profiler, as Lightning's `Precision` does."""
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(module.trainer, name, *args)
    call._call_lightning_module_hook(module.trainer, name, *args)


# --- Lightning: evaluation ---
# Lightning evaluates a module inside one loop that owns the results, and has no public way to evaluate a second module
# on the same batches and let `self.log` name, weight and reduce its values. Upstream thread: none known. All entries of
# this section can go when Lightning offers a result collection that a callback may create and read.


def own_results(view: Any, trainer: Any, memo: dict[int, Any]) -> None:
    """Give a view of the trainer its own result collection and logger connector.

    `LightningModule.log` writes to `trainer._results` and `trainer._logger_connector`. With its own pair, a copy of a
    module logs with Lightning's naming, batch-size weighting and reduction, and the trainer never hears of it.

    Args:
        view: stands in for the trainer; gets the attributes.
        trainer: the real one. What it has collected in this evaluation so far is copied.
        memo: of the deep copy of the module, so that the metric objects in the results are the copy's own.
    """
    from copy import deepcopy

    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

    real = trainer._results
    results = _ResultCollection(training=real is not None and real.training)
    if real is not None:
        results.dataloader_idx = real.dataloader_idx
        for key, item in real.items():
            if item.has_reset:  # left over from an earlier evaluation
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
    """`callback_metrics`, `logged_metrics` or `progress_bar_metrics` of the view's own connector.

    `Trainer.callback_metrics` and its siblings are properties over `_logger_connector`.
    """
    return getattr(view._logger_connector, name)


def start_evaluation_batch(view: Any, batch: Any, dataloader_idx: int | None) -> None:
    """Tell the view's results which batch is next, as the evaluation loop does before its batch hooks."""
    view._logger_connector.on_batch_start(batch, dataloader_idx)


def finish_evaluation_batch(view: Any) -> None:
    """Drop the reference to the batch. Step values are never read, so they are not collected here."""
    view._results.batch = None
    view._results.batch_size = None


def finish_evaluation_loader(view: Any) -> dict[str, Tensor]:
    """Reduce what was logged for the current loader, as `_EvaluationLoop._store_dataloader_outputs` does."""
    connector = view._logger_connector
    connector.epoch_end_reached()
    connector.update_eval_epoch_metrics()
    return dict(connector.metrics["callback"])


def start_evaluation_epoch_end(view: Any) -> None:
    """What the evaluation loop does between the last loader and `on_*_epoch_end`."""
    view._logger_connector.epoch_end_reached()
    view._logger_connector._evaluation_epoch_end()


def finish_evaluation_epoch_end(view: Any) -> dict[str, Tensor]:
    """What the evaluation loop does after `on_*_epoch_end`; returns the values logged there."""
    connector = view._logger_connector
    connector.on_epoch_end()
    connector.update_eval_epoch_metrics()
    return dict(connector.metrics["callback"])


def evaluation_loader_idx(trainer: Any) -> int | None:
    """Index of the loader of the current batch; `None` with one loader, where hooks do not get the argument."""
    results = trainer._results
    return None if results is None else results.dataloader_idx


def evaluation_metrics(trainer: Any) -> dict[str, Tensor]:
    """Epoch values that the current evaluation has logged and already reduced, by their name in `callback_metrics`.

    `trainer.callback_metrics` also holds what training logged and what earlier evaluations left.
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
    """Names of `evaluation_metrics`, known before the values are: the sanity check does not reduce them."""
    results = trainer._results
    if results is None:
        return set()
    items = [item for item in results.values() if item.meta.on_epoch and not item.has_reset]
    return {name for item in items for name in results._forked_name(item, on_step=False)}


def add_callback_metrics(trainer: Any, metrics: dict[str, Tensor]) -> None:
    """Add values to `trainer.callback_metrics` where `self.log` is not allowed (`on_validation_end`)."""
    trainer._logger_connector._callback_metrics.update(metrics)


def log_evaluation_metrics(trainer: Any, metrics: dict[str, Tensor], step: float | None) -> int:
    """Send values to all loggers as Lightning sends those of an evaluation, and return the step that they got.

    The step is not `global_step`, but a `step` that the user logged, else the private counter of batches after which an
    optimizer stepped.
    """
    number = trainer.fit_loop.epoch_loop._batches_that_stepped if step is None else int(step)
    connector = trainer._logger_connector
    # As in `log_metrics`, which adds the epoch only where there is no `step`.
    connector.log_metrics(metrics if step is None else {**metrics, "step": torch.tensor(float(number))})
    return number


def call_module_hook(module: Any, name: str, *args: Any) -> Any:
    """Call a hook so that `self.log` works in it: it looks up `_current_fx_name`, which only the Trainer sets."""
    previous = module._current_fx_name
    module._current_fx_name = name
    try:
        return getattr(module, name)(*args)
    finally:
        module._current_fx_name = previous


def forget_metric_names(module: Any) -> None:
    """Drop the cache of metric names by `id`: in a copied module the ids are those of the original's metrics."""
    from lightning.pytorch import LightningModule

    for child in module.modules():
        if isinstance(child, LightningModule):
            child._metric_attributes = None


COMPILED_CHILD = "_orig_mod"
"""Name of the module inside one that `torch.compile` returned: a part of its qualified names in `named_modules`."""

WRAPPED_CHILDREN = {COMPILED_CHILD, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""The same for what FSDP1 and activation checkpointing wrap; no public constants."""


def plain_name(name: str) -> str:
    """A qualified name without what wrappers put in between: as it was before the module was compiled or sharded."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_CHILDREN)


def plain_parameters(module: Any) -> dict[str, Any]:
    """The parameters of a module by their :func:`plain_name`."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def uncompiled_module(module: Any) -> Any:
    """The module inside one that `torch.compile` returned, else `None`. Torch has no public way to ask."""
    from torch._dynamo import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def uncompiled_state(state: dict[str, Any]) -> dict[str, Any]:
    """Undo what `torch.compile(LightningModule)` put among the attributes of a module.

    Lightning stores compiled functions, bound to the original module, as attributes over the methods.
    """
    context = state.get("_compiler_ctx")
    if not context:
        return state
    state = dict(state, _compiler_ctx=None)
    for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
        state[name] = context[f"original_{name}"]
    return state


def logging_step(trainer: Any) -> int:
    """The step that Lightning itself logs training metrics at; its own callbacks read this private counter too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_rank_zero() -> bool:
    """Whether this process writes files (`rank_zero_only.rank` is public, but unset before a Trainer exists)."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


# --- Lightning: training steps of a shadow ---
# A training step that runs twice reaches its optimizers through private attributes of the strategy; Lightning has no
# public way to hand it others. Can go when `LightningModule.optimizers` asks the trainer for what it returns.


def optimizer_attributes(trainer: Any, stand_in: Any) -> dict[str, Any]:
    """Attributes for a view of a strategy: what `LightningModule.optimizers()` returns, each through `stand_in`."""
    wrapped = trainer.strategy._lightning_optimizers
    return {
        "_lightning_optimizers": [stand_in(optimizer) for optimizer in wrapped],
        "optimizers": [stand_in(optimizer) for optimizer in trainer.strategy.optimizers],
    }
