"""Private names of torch that a step needs: kernels, `GradScaler`, autograd and fused optimizers."""

from __future__ import annotations

import functools
import platform
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.optim.optimizer as _optimizer_module
from torch import Tensor
from torch.utils import _foreach_utils
from typing_extensions import final

# --- torch: foreach and amp kernels ----------------------------------------------------------------------------------
# The multi-tensor kernels that `GradScaler` and `torch.optim` run on are private; their public wrappers
# (`GradScaler.unscale_`, `clip_grad_norm_`) cannot express complex gradients, two steps in a batch, or a check alone.

# (grads, found_inf, factor): multiplies by `factor` [] in place, and sets `found_inf` [] to 1.0 if a value was not
# finite before. All are on one device. This is an alias, because a function around it would cost time in every step.
# Remove when torch makes it public.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def foreach_mul_(grads: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors by `factor` in place. Remove when torch makes `torch._foreach_mul_` public."""
    torch._foreach_mul_(grads, factor)


def foreach_norm(grads: list[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Compute the vector norm of each tensor, each of shape []. Remove when `torch._foreach_norm` is public."""
    return list(torch._foreach_norm(grads, order, dtype=dtype))


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy `sources` into `targets`, one launch per dtype. Remove when `torch._foreach_copy_` is public."""
    torch._foreach_copy_(targets, sources)


def sparse_values(grad: Tensor) -> Tensor:
    """Return the values of a sparse gradient without coalescing it first, as `GradScaler` does.

    `values` refuses a tensor that is not coalesced. Remove when `values` accepts it.
    """
    return grad._values()


# --- torch: GradScaler -----------------------------------------------------------------------------------------------
# `GradScaler` has no public way to read or set its scale without waiting (`get_scale` calls `.item()`), or to receive a
# found_inf flag.


_in_graphs: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
"""Scalers that a CUDA graph has captured. The graph reads and writes the tensors that they had at the capture."""


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured.

    During a capture the host must not wait, and every replay repeats the decisions made during the capture. Remove when
    `torch.cuda.is_current_stream_capturing` does not raise in a torch without CUDA.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Remove when `GradScaler` has a getter that does not wait.
def scale_tensor(scaler: torch.amp.GradScaler, device: torch.device | None = None) -> Tensor:
    """Return the scale [], which no later update changes.

    A scaler that was not used yet creates the scale on `device`.
    """
    scale = scaler._scale
    if scale is None:
        scaler._lazy_init_scale_growth_tracker(device or torch.device(scaler._device))
        scale = scaler._scale
    assert scale is not None
    if is_capturing():
        _in_graphs.add(scaler)
    return scale.clone() if scaler in _in_graphs else scale


def growth_tracker(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the clean steps in a row, int32, shape []. Remove when `GradScaler` has a getter that does not wait."""
    tracker = scaler._growth_tracker
    assert tracker is not None  # the tracker is made together with the scale
    return tracker


GROWTH_TRACKER = "_growth_tracker"
"""Where a `GradScaler.state_dict` keeps the clean steps in a row. Remove when the key has a public name."""


# Remove when `GradScaler` has a setter.
def set_scale_tensor(scaler: torch.amp.GradScaler, scale: Tensor, tracker: Tensor | None = None) -> None:
    """Replace the scale (and the growth tracker).

    If a CUDA graph has captured the scaler, keep the memory of both tensors.
    """
    if scaler in _in_graphs:
        assert scaler._scale is not None
        scaler._scale.copy_(scale)
        if tracker is not None:
            growth_tracker(scaler).copy_(tracker)
        return
    scaler._scale = scale
    if tracker is not None:
        scaler._growth_tracker = tracker


def reset_scale(scaler: torch.amp.GradScaler, scale: float, tracker: int = 0) -> None:
    """Return a scaler to its state before the first use, with this scale. Remove when `GradScaler` can be reset."""
    _in_graphs.discard(scaler)
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


# Remove when `GradScaler.update` takes a flag.
def give_found_inf(scaler: torch.amp.GradScaler, found_inf: Tensor) -> None:
    """Pass our flag to a scaler of another class, so that its own `update` can be called."""
    scaler._per_optimizer_states = _no_optimizer_states()
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {found_inf.device: found_inf}


# Remove with `give_found_inf`.
def has_found_infs(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler has flags for its next update."""
    return bool(scaler._per_optimizer_states)


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


# Remove when torch can tell whether memory was written to since a mark.
def watch_writes(tensor: Tensor) -> tuple[Any, ...] | None:
    """Mark the memory of a tensor on the CPU until the next write to it. Return its place; `None` if it has no mark.

    It makes a copy on write and drops it, which marks the memory and copies nothing. Code that asks torch for a pointer
    through which memory can be written removes the mark. So do operations in place and with `out=`, through the tensor
    or any alias (`.data`, a view). NumPy, DLPack and `data_ptr()` do so too.

    Memory that another tensor or library holds is not marked, because the holder may have such a pointer already. Some
    builds of torch 2.8 cannot count the holders, and mark nothing. A write to a bare address that was taken earlier is
    not seen. On CUDA this would be wrong, because the kernels of `torch._foreach_*_` write through a pointer for
    reading.
    """
    storage = tensor.untyped_storage()
    count_holders = getattr(torch._C, "_storage_Use_Count", None)
    if count_holders is None or count_holders(storage._cdata) > 2:  # `tensor` and `storage` are two
        return None
    try:
        with torch.no_grad():
            torch._lazy_clone(tensor)
    except RuntimeError:  # another library has allocated the memory
        return None
    return _place(tensor)


# Remove with `watch_writes`.
def is_unwritten(tensor: Tensor, place: tuple[Any, ...]) -> bool:
    """Return whether the tensor is in the same place, and its memory still has the mark of :func:`watch_writes`."""
    return torch._C._is_cow_tensor(tensor) and _place(tensor) == place  # pyright: ignore[reportAttributeAccessIssue]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return torch._C._data_address(tensor), tensor.shape, tensor.stride()  # pyright: ignore[reportAttributeAccessIssue]


# Remove when a hook can find out in which backward it runs.
def backward_number() -> int:
    """Return the number of the backward that runs in this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()


# Remove when a hook can find out whether `backward` or `torch.autograd.grad` runs it.
def adds_to_gradients(node: Any) -> bool:
    """Return, inside a backward, whether it adds to `.grad` of a leaf below `node`; `torch.autograd.grad` does not.

    The search stops at the first leaf that decides the answer. If all leaves are hidden in custom functions, the
    result is `True`.
    """
    seen, below, leaves = {node}, [node], False
    while below:
        node = below.pop()
        if hasattr(node, "variable"):  # the node that adds to the `.grad` of a leaf
            leaves = True
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # "... but we are currently running autograd.grad()"
                return False
        nodes = {following for following, _ in getattr(node, "next_functions", ()) if following is not None} - seen
        seen |= nodes
        below += nodes
    return not leaves


# --- torch: optimizers -----------------------------------------------------------------------------------------------
# Fused optimizers skip inside their kernel if two attributes say so. `GradScaler.step` uses this protocol, which has no
# public form.

_FUSED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of this optimizer reads `found_inf` and `grad_scale` on the device, after its closure.

    Only torch's own classes qualify, since a third-party fused optimizer may read them before the closure. Remove when
    torch has a public check.
    """
    return isinstance(optimizer, _FUSED_CLASSES) and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Remove when torch has a public list.
def fused_device_types() -> list[str]:
    """Return the types of devices for which torch has fused optimizers."""
    return _foreach_utils._get_fused_kernels_supported_devices()


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
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    for hooks in (_optimizer_module._global_optimizer_pre_hooks, _optimizer_module._global_optimizer_post_hooks):
        for hook in hooks.values():
            if not getattr(hook, "only_looks", False):
                return True
    return False


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


# Remove when torch 2.9, which has `fp32_precision`, is the oldest supported.
def older_fp32_switches() -> tuple[Any, ...]:
    """Return substitutes for the switches `fp32_precision` up to torch 2.8, and nothing from torch 2.9 on."""
    return () if hasattr(torch.backends, "fp32_precision") else (_OlderMatmul(), _OlderCudnn())


@final
class _OlderMatmul:
    """`torch.set_float32_matmul_precision` as a switch, for cuBLAS and, with "medium", oneDNN."""

    @property
    def fp32_precision(self) -> str:
        precision = torch.get_float32_matmul_precision()
        return "ieee" if precision == "highest" else precision

    @fp32_precision.setter
    def fp32_precision(self, precision: str) -> None:
        words = {"ieee": "highest", "none": "highest", "tf32": "high"}
        torch.set_float32_matmul_precision(words.get(precision, precision))


@final
class _OlderCudnn:
    """`torch.backends.cudnn.allow_tf32`, for convolutions and recurrent layers, as a switch."""

    @property
    def fp32_precision(self) -> str:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"

    @fp32_precision.setter
    def fp32_precision(self, precision: str) -> None:
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


# Remove when a profile has a public list of allocations; `export_memory_timeline` is deprecated and writes a file.
def peak_of_allocations(profile: Any) -> int:
    """Return the most bytes that were allocated on the CPU at once in a profile with `profile_memory=True`."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    cpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    held = peak = 0
    for event in sorted(cpu, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# Remove when there is a public check.
def is_profiling() -> bool:
    """Return whether a torch profiler is running in this thread. Starting a second one would end it."""
    return bool(torch.autograd._profiler_enabled())


def leaves(tensor: Tensor) -> list[Tensor]:
    """Return the leaves that a backward of a tensor adds gradients to. Remove when torch lists them."""
    seen, below = set(), [tensor.grad_fn]
    found: list[Tensor] = []
    while below:
        node: Any = below.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        below += [following for following, _ in node.next_functions]
    return found


# --- wrappers of optimizers ------------------------------------------------------------------------------------------

_WRAPPERS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers", "accelerate.optimizer")


@functools.cache
def is_wrapper(kind: type[Any]) -> bool:
    """Return whether objects of a class are wrappers of Fabric or Accelerate. Remove with `unwrap_optimizer`."""
    return any(base.__module__ in _WRAPPERS for base in kind.__mro__)


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the user's optimizer behind a wrapper of Fabric or Accelerate. Remove when both have one public name."""
    return optimizer.optimizer if is_wrapper(type(optimizer)) else optimizer
