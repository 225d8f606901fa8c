"""Private names of torch that a step needs: kernels, `GradScaler`, autograd and fused optimizers."""

from __future__ import annotations

import inspect
import platform
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.optim.optimizer as _optimizer_module
from torch import Tensor

# --- torch: foreach and amp kernels ----------------------------------------------------------------------------------
# The multi-tensor kernels that `GradScaler` and `torch.optim` run on are private; their public wrappers
# (`GradScaler.unscale_`, `clip_grad_norm_`) cannot express complex gradients, two steps in a batch, or a check alone.

# (grads, found_inf, factor): multiplies by `factor` [] in place, and sets `found_inf` [] to 1.0 if a value was not
# finite before. All are on one device. This is an alias, because a function around it would cost time in every step.
# Remove when torch makes it public.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


foreach_mul_ = torch._foreach_mul_
"""Multiplies all tensors by a factor in place. Remove when torch makes it public."""

foreach_norm = torch._foreach_norm
"""Computes the vector norm of each tensor, each of shape []. Remove when torch makes it public."""

foreach_copy_ = torch._foreach_copy_
"""Copies many tensors into others, one launch per dtype. Remove when torch makes it public."""


def sparse_values(grad: Tensor) -> Tensor:
    """Return the values of a sparse gradient without coalescing it first, as `GradScaler` does.

    `values` refuses a tensor that is not coalesced. Remove when `values` accepts it.
    """
    return grad._values()


# --- torch: GradScaler -----------------------------------------------------------------------------------------------
# `GradScaler` has no public way to read or set its scale without waiting (`get_scale` calls `.item()`), or to receive a
# found_inf flag.


# Remove when `GradScaler` has a getter that does not wait.
def scale_tensor(scaler: torch.amp.GradScaler, device: torch.device | None = None) -> Tensor:
    """Return the scale [], which no later update changes.

    A scaler that was not used yet creates the scale on `device`.
    """
    if scaler._scale is None:
        with torch.inference_mode(False):
            scaler._lazy_init_scale_growth_tracker(device or torch.device(scaler._device))
    scale: Any = scaler._scale
    return scale


def growth_tracker(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the clean steps in a row, int32, shape []. Remove when `GradScaler` has a getter that does not wait."""
    tracker: Any = scaler._growth_tracker  # is made together with the scale
    return tracker


GROWTH_TRACKER = "_growth_tracker"
"""Where a `GradScaler.state_dict` keeps the clean steps in a row. Remove when the key has a public name."""


# Remove when `GradScaler` has a setter.
def set_scale_tensor(scaler: torch.amp.GradScaler, scale: Tensor, tracker: Tensor | None = None) -> None:
    """Replace the scale (and the growth tracker)."""
    scaler._scale = scale
    if tracker is not None:
        scaler._growth_tracker = tracker


def reset_scale(scaler: torch.amp.GradScaler, scale: float, tracker: int = 0) -> None:
    """Return a scaler to its state before the first use, with this scale. Remove when `GradScaler` can be reset."""
    scaler._init_scale, scaler._init_growth_tracker = scale, tracker
    scaler._scale = scaler._growth_tracker = None
    scaler._per_optimizer_states = _no_optimizer_states()


# Remove when `GradScaler` takes the device of the first loss.
def set_scaler_device(scaler: torch.amp.GradScaler, device_type: str) -> None:
    """Set the device type. A Trainer chooses the device only after the user has made the scaler."""
    scaler._device = device_type


# Remove when `GradScaler` passes its flags to a custom policy.
def take_found_infs(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """Take the flags recorded since the last update, as `GradScaler.update` does."""
    states = scaler._per_optimizer_states
    scaler._per_optimizer_states = _no_optimizer_states()
    return [flag for state in states.values() for flag in state["found_inf_per_device"].values()]


def _no_optimizer_states() -> Any:
    return defaultdict(torch.amp.grad_scaler._refresh_per_optimizer_state)


# Remove when torch makes the kernel public.
def amp_update_scale(scaler: torch.amp.GradScaler, scale: Tensor, tracker: Tensor, found_inf: Tensor) -> None:
    """Update scale and tracker in place by torch's own kernel, so that the default policy equals torch's to the bit."""
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, scaler.get_growth_interval())


# --- torch: autograd -------------------------------------------------------------------------------------------------

_unsafe_view = torch.ops.aten._unsafe_view.default


def cast_to(parameter: Tensor, copy: Tensor) -> Tensor:
    """Return `copy` with the autograd history of `parameter.to(copy.dtype)`, without casting again.

    Autograd casts its gradient to the parameter's dtype, as for a cast. A custom `autograd.Function` could do the same,
    but its Python takes longer than casting a small weight. `_unsafe_view` has the identity as its derivative, moves no
    data and is not a view. A view would share the parameter's version counter, so an optimizer step between forward and
    backward would be an error. Remove when torch offers a cast into given memory.
    """
    alias = _unsafe_view(parameter, parameter.shape)
    alias.data = copy
    return alias


# Remove when torch can tell whether memory was written to.
def watch_writes(tensor: Tensor) -> Place | None:
    """Mark the memory of a tensor on the CPU until the next write to it. Return its place; `None` if it has no mark.

    It makes a copy on write and drops it, which marks the memory and copies nothing. Code that asks torch for a pointer
    through which memory can be written removes the mark. It may do so through the tensor or any alias (`.data`, a
    view): operations in place and with `out=`, NumPy, DLPack, `data_ptr()`. Memory that another tensor or library holds
    is not marked, because the holder may have such a pointer already. A write to a bare address that was taken earlier
    is not seen.

    On CUDA this would be wrong, because the kernels of `torch._foreach_*_` write through a pointer for reading. Some
    builds of torch 2.8 cannot count the holders, so nothing is marked.
    """
    storage = tensor.untyped_storage()
    count_uses = getattr(torch._C, "_storage_Use_Count", None)
    if count_uses is None or count_uses(storage._cdata) > 2:  # `tensor` and `storage` are two
        return None
    try:
        with torch.no_grad():
            torch._lazy_clone(tensor)
    except RuntimeError:  # another library has allocated the memory
        return None
    return _place(tensor)


# Remove with `watch_writes`.
def is_unwritten(tensor: Tensor, place: Place) -> bool:
    """Return whether the tensor is in the same place, and its memory still has the mark of :func:`watch_writes`."""
    return torch._C._is_cow_tensor(tensor) and _place(tensor) == place  # pyright: ignore[reportAttributeAccessIssue]


Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides. Remove with `watch_writes`."""


def _place(tensor: Tensor) -> Place:
    return torch._C._data_address(tensor), tensor.shape, tensor.stride()  # pyright: ignore[reportAttributeAccessIssue]


_NOTHING = nullcontext()


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without autocast. Remove when torch's own one costs nothing where autocast is off already."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _NOTHING


# Remove when a hook can find out in which backward it runs.
def backward_number() -> int:
    """Return the number of the backward that runs in this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()


# Remove when torch has a public hook for the end of a backward.
def call_after_backward(function: Any) -> None:
    """Call a function, inside of a backward, when that backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


# --- torch: optimizers -----------------------------------------------------------------------------------------------
# Fused optimizers skip inside their kernel if two attributes say so. `GradScaler.step` uses this protocol, which has no
# public form.

# the first optimizer of a class gets a `step` that is wrapped for the profiler
_FUSED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of this optimizer reads `found_inf` and `grad_scale` on the device, after its closure.

    Only torch's own `step` qualifies, since another one may read the gradients before the closure, or after it. Remove
    when torch has a public check.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return inspect.unwrap(type(optimizer).step) in {inspect.unwrap(kind.step) for kind in _FUSED_CLASSES}


# Remove when loading a checkpoint leaves `fused` alone.
def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is still fused. Loading a checkpoint overwrites `fused`."""
    return all(group["fused"] for group in optimizer.param_groups)


# Remove when `Optimizer.step` has an argument for the flag.
def set_found_inf(optimizer: Any, found_inf: Tensor) -> None:
    """Give the flag to a fused optimizer. Its kernel skips only if `found_inf == 1`."""
    optimizer.found_inf = found_inf


def set_grad_scale(optimizer: Any, grad_scale: Tensor | None) -> None:
    """Have a fused optimizer divide gradients by `grad_scale`. Remove with `set_found_inf`."""
    optimizer.grad_scale = grad_scale


def clear_amp_attributes(optimizer: Any) -> None:
    """Undo `set_found_inf` and `set_grad_scale`. Remove with `set_found_inf`."""
    attributes = vars(optimizer)
    attributes.pop("found_inf", None)
    attributes.pop("grad_scale", None)


def momentum_is_uninitialised(optimizer: torch.optim.SGD) -> bool:
    """Return whether a skipped first step would leave garbage in a fused SGD's momentum.

    torch 2.13 allocates `momentum_buffer` with `empty_like` and fills it inside the kernel, which does not run on a
    skip (`torch/optim/sgd.py`, `_fused_sgd`). Found by this project. Remove when torch fills it before the kernel.
    """
    return any(
        group["momentum"] != 0 and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook is registered around `step`, of this optimizer or of all optimizers.

    Hooks with an attribute `only_looks` do not count. Remove when torch has a public check.
    """
    # a class of the user's may be no `Optimizer` of torch, or not call its `__init__`
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    everywhere = (_optimizer_module._global_optimizer_pre_hooks, _optimizer_module._global_optimizer_post_hooks)
    return any(not getattr(hook, "only_looks", False) for hooks in (*own, *everywhere) for hook in hooks.values())


# --- torch: older versions -------------------------------------------------------------------------------------------


def cpu_capabilities() -> Mapping[str, Any]:
    """Return `torch.cpu.get_capabilities()`, or only its bfloat16 entries up to torch 2.10, which lacks that function.

    Remove when torch 2.11 is the oldest supported.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    if platform.machine().lower() in {"arm64", "aarch64"}:
        return {"bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    return {"amx_bf16": torch.cpu._is_amx_tile_supported(), "avx512_bf16": torch.cpu._is_avx512_bf16_supported()}


# --- wrappers of optimizers ------------------------------------------------------------------------------------------

_WRAPPERS = {
    "lightning.pytorch.core.optimizer",
    "pytorch_lightning.core.optimizer",
    "lightning.fabric.wrappers",
    "lightning_fabric.wrappers",
    "accelerate.optimizer",
}


def is_wrapper(optimizer: Any) -> bool:
    """Return whether an object wraps an optimizer of the user. Remove with `unwrap_optimizer`."""
    return type(optimizer).__module__ in _WRAPPERS and hasattr(optimizer, "optimizer")


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the user's optimizer behind a wrapper of Lightning, Fabric or Accelerate.

    Remove when hooks get the user's optimizer.
    """
    return optimizer.optimizer if is_wrapper(optimizer) else optimizer
