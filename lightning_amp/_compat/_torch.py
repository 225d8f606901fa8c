"""Private names of torch that a step needs: kernels, `GradScaler`, autograd, fused optimizers; each with its reason."""

from __future__ import annotations

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

# (grads, found_inf, factor): multiplies by `factor` [] in place and sets `found_inf` [] to 1.0 if a value was not
# finite before; one device. Not a function of ours, since it is called in every step. Can go when torch makes it
# public.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def foreach_mul_(grads: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors by `factor` in place. Can go when torch makes `torch._foreach_mul_` public."""
    torch._foreach_mul_(grads, factor)


def foreach_norm(grads: list[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Compute the vector norm of each tensor, each of shape []. Can go when `torch._foreach_norm` is public."""
    return list(torch._foreach_norm(grads, order, dtype=dtype))


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy `sources` into `targets`, one launch per dtype. Can go when `torch._foreach_copy_` is public."""
    torch._foreach_copy_(targets, sources)


def sparse_values(grad: Tensor) -> Tensor:
    """Return the values of a sparse gradient without coalescing it first, as `GradScaler` takes them.

    `values` refuses a tensor that is not coalesced. Can go when it does not.
    """
    return grad._values()


# --- torch: GradScaler -----------------------------------------------------------------------------------------------
# `GradScaler` has no public way to read or set its scale without waiting for the device (`get_scale` is an `.item()`),
# nor to be told a found_inf flag from outside.


_in_graphs: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
"""Scalers that a CUDA graph has captured: it goes on to read and write the very tensors that they had then."""


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: the host may not wait, and replays repeat what it decides now.

    Can go when `torch.cuda.is_current_stream_capturing` does not raise in a torch without CUDA.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Can go when `GradScaler` has a getter that does not wait.
def scale_tensor(scaler: torch.amp.GradScaler, device: torch.device | None = None) -> Tensor:
    """Return the scale, shape [], made on `device` if the scaler is unused yet. No later update changes this tensor."""
    scale = scaler._scale
    if scale is None:
        scaler._lazy_init_scale_growth_tracker(device or torch.device(scaler._device))
        scale = scaler._scale
    assert scale is not None
    if is_capturing():
        _in_graphs.add(scaler)
    return scale.clone() if scaler in _in_graphs else scale


def growth_tracker(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the clean steps in a row, int32, shape []. Can go when `GradScaler` has a getter that does not wait."""
    tracker = scaler._growth_tracker
    assert tracker is not None  # made together with the scale
    return tracker


GROWTH_TRACKER = "_growth_tracker"
"""Where a `GradScaler.state_dict` keeps the clean steps in a row. Can go when the key has a public name."""


# Can go when `GradScaler` has a setter.
def set_scale_tensor(scaler: torch.amp.GradScaler, scale: Tensor, tracker: Tensor | None = None) -> None:
    """Replace the scale (and the growth tracker), in memory that stays once a graph has captured the scaler."""
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
    """Go back to the state before first use, with this scale. Can go when `GradScaler` can be reset."""
    _in_graphs.discard(scaler)
    scaler._init_scale, scaler._init_growth_tracker = scale, tracker
    scaler._scale = scaler._growth_tracker = None
    scaler._per_optimizer_states = _no_optimizer_states()


# Can go when `GradScaler` takes the device of the first loss.
def set_scaler_device(scaler: torch.amp.GradScaler, device_type: str) -> None:
    """Set the device type, which a Trainer knows only after the scaler was made."""
    scaler._device = device_type


# Can go when `GradScaler` hands its flags to a policy of one's own.
def take_found_infs(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """Take the flags recorded since the last update, as `GradScaler.update` does."""
    states = scaler._per_optimizer_states
    scaler._per_optimizer_states = _no_optimizer_states()
    return [flag for state in states.values() for flag in state["found_inf_per_device"].values()]


# Can go when `GradScaler.update` takes a flag.
def give_found_inf(scaler: torch.amp.GradScaler, found_inf: Tensor) -> None:
    """Tell somebody else's scaler what we found, so that its own `update` can be called."""
    scaler._per_optimizer_states = _no_optimizer_states()
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {found_inf.device: found_inf}


# Can go with `give_found_inf`.
def has_found_infs(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler was told any flag since its last update."""
    return bool(scaler._per_optimizer_states)


def _no_optimizer_states() -> Any:
    return defaultdict(torch.amp.grad_scaler._refresh_per_optimizer_state)


# Can go when torch makes the kernel public.
def amp_update_scale(scaler: torch.amp.GradScaler, scale: Tensor, tracker: Tensor, found_inf: Tensor) -> None:
    """Update scale and tracker in place by torch's own kernel, so that the default policy equals torch's to the bit."""
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, scaler.get_growth_interval())


# --- torch: autograd -------------------------------------------------------------------------------------------------

_unsafe_view = torch.ops.aten._unsafe_view.default


def cast_to(parameter: Tensor, copy: Tensor) -> Tensor:
    """Return what `parameter.to(copy.dtype)` is to autograd, without computing it: the values of `copy` are taken.

    The result has a node of its own, whose gradient autograd casts to the parameter's dtype, as that of a cast. A
    custom `autograd.Function` does the same in Python, and takes longer than casting a small weight. The node is made
    by the one operation that has the identity as its derivative, moves no data and is not a view: a view would share
    the parameter's version counter, and an optimizer step between forward and backward would be an error. Can go when
    torch offers a cast into memory that is given.
    """
    alias = _unsafe_view(parameter, parameter.shape)
    alias.data = copy
    return alias


# Can go when a hook is told which backward it runs in.
def backward_number() -> int:
    """Return which backward runs in this thread, one number for each; -1 outside of any."""
    return torch._C._current_graph_task_id()


# Can go when a hook is told whether `backward` or `torch.autograd.grad` runs it.
def adds_to_gradients(node: Any) -> bool:
    """Return, inside a backward, whether it adds to `.grad` of anything below `node`; `torch.autograd.grad` does not.

    Looks no further than the first leaf that tells. Where none is to be seen (all are inside of custom functions): yes.
    """
    seen, below, leaves = {node}, [node], False
    while below:
        node = below.pop()
        if hasattr(node, "variable"):  # adds to the `.grad` of a leaf
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
# Fused optimizers skip inside their kernel, told by two attributes. This is the protocol that `GradScaler.step` uses;
# it has no public form.

_FUSED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of this optimizer reads `found_inf` and `grad_scale` on the device, after its closure.

    Only torch's own classes are taken at their word: somebody else's fused optimizer may read them before. Can go when
    torch has a public question for it.
    """
    return isinstance(optimizer, _FUSED_CLASSES) and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Can go when torch has a public list.
def fused_device_types() -> list[str]:
    """Return the types of devices for which torch has fused optimizers."""
    return _foreach_utils._get_fused_kernels_supported_devices()


# Can go when loading a checkpoint leaves `fused` alone.
def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is still fused: a checkpoint brings the `fused` of the run that wrote it."""
    return all(group["fused"] for group in optimizer.param_groups)


# Can go when `Optimizer.step` has an argument for the flag.
def set_found_inf(optimizer: Any, found_inf: Tensor) -> None:
    """Hand the flag to a fused optimizer. The kernels test `found_inf == 1`: any other value steps."""
    optimizer.found_inf = found_inf


def set_grad_scale(optimizer: Any, grad_scale: Tensor | None) -> None:
    """Hand a fused optimizer what to divide gradients by. Can go with `set_found_inf`."""
    optimizer.grad_scale = grad_scale


def clear_amp_attributes(optimizer: Any) -> None:
    """Undo both. Can go with `set_found_inf`."""
    attributes = vars(optimizer)
    attributes.pop("found_inf", None)
    attributes.pop("grad_scale", None)


def momentum_is_uninitialised(optimizer: torch.optim.SGD) -> bool:
    """Return whether a skipped first step would leave garbage in a fused SGD's momentum.

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
    """Return whether anybody registered a hook around `step`, on this optimizer or on all.

    One that `only_looks` does not count. Can go when torch has a public question for it.
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
    """Return `torch.cpu.get_capabilities()`, and up to torch 2.10, which has none, what it says of bfloat16.

    Can go when torch 2.11 is the oldest supported.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    if platform.machine().lower() in {"arm64", "aarch64"}:
        return {"bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    return {"amx_bf16": torch.cpu._is_amx_tile_supported(), "avx512_bf16": torch.cpu._is_avx512_bf16_supported()}


# Can go when torch 2.9, which has `fp32_precision`, is the oldest supported.
def older_fp32_switches() -> tuple[Any, ...]:
    """Return what stands for the switches `fp32_precision` up to torch 2.8, and nothing from torch 2.9 on."""
    return () if hasattr(torch.backends, "fp32_precision") else (_OlderMatmul(), _OlderCudnn())


@final
class _OlderMatmul:
    """`torch.set_float32_matmul_precision` as a switch: cuBLAS and, with "medium", oneDNN."""

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


# Can go when a profile has a public list of allocations; `export_memory_timeline` is deprecated and writes a file.
def peak_of_allocations(profile: Any) -> int:
    """Return the most bytes that were allocated on the CPU at once in a profile with `profile_memory=True`."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    cpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    held = peak = 0
    for event in sorted(cpu, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# Can go when there is a public question.
def is_profiling() -> bool:
    """Return whether a profiler of torch is on in this thread: a second one would end it."""
    return bool(torch.autograd._profiler_enabled())
