"""Private names of torch around modules: their dictionaries, compilers, transforms and wrappers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint_module
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue, reportMissingModuleSource]
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from typing_extensions import final

# --- torch: modules and tensors --------------------------------------------------------------------------------------


def norm_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Find the normalisation layers that keep running statistics. Remove when their common base class is public."""
    from torch.nn.modules.batchnorm import _NormBase

    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dictionary in which a module looks up its own parameters.

    The public `functional_call` writes tensors into it one by one, with checks and a search for ties. Remove when a
    public function replaces the dictionary for the length of a call.
    """
    return vars(module)["_parameters"]


def is_transformed_or_traced() -> bool:
    """Return whether a `torch.func` transform or `torch.jit.trace` is active.

    Neither accepts a plain `autograd.Function`. Remove when there is a public check for the first. The public check for
    the second is ten times as slow.
    """
    return torch._C._are_functorch_transforms_active() or bool(torch._C._get_tracing_state())


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is a batch of gradients in `torch.autograd.grad(..., is_grads_batched=True)`.

    Its `vmap` is older than `torch.func`, whose checks do not see it. Remove when torch has removed it.
    """
    return torch._C._dispatch_keys(tensor).has(torch._C._dispatch_key_parse("Batched"))


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active, so that any tensor may have a tangent.

    Remove when there is a public check that does not need a tensor.
    """
    return torch.autograd.forward_ad._current_level >= 0


_REPLAYING = (_checkpoint_module._CachingTorchDispatchMode, _checkpoint_module._CachedTorchDispatchMode)


def is_replayed() -> bool:
    """Return whether selective activation checkpointing records operations, or replays them in the backward.

    Both runs must execute the same operations in the same order. Its two modes have no public names. Remove when there
    is a public check for them, or a way to hide operations from them.
    """
    return any(isinstance(m, _REPLAYING) for m in _get_current_dispatch_mode_stack())


# Remove when there is one public check for all of them.
def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of this module are compiled, by torch or by Lightning, or scripted."""
    dynamo = sys.modules.get("torch._dynamo")  # `None` if the compiler was never imported, so nothing is compiled
    return (
        (dynamo is not None and isinstance(module, dynamo.OptimizedModule))
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or getattr(module, "_compiler_ctx", None) is not None
        or hasattr(getattr(type(module), "forward", None), "_torchdynamo_orig_callable")
    )


UNCOMPILED = {"_compiled_call_impl": None}
"""Attributes with which a module runs without its compiled code. Remove when `Module.compile` can be undone."""


@final
class Flag:
    """A flag that copies of an object share.

    `torch.compile` calls `set()` once, while it traces, and adds nothing to the graph. That is the effect of
    `torch.compiler.assume_constant_result`, which imports the whole compiler. Remove when that import is cheap.
    """

    def __init__(self) -> None:
        self.is_set = False

        # a function and not a method, because torch 2.8 calls a marked function with constants only
        def set_flag() -> None:
            self.is_set = True

        set_flag._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
        self.set = set_flag


def buffer_names(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own buffers. Remove when `named_buffers` includes buffers that are `None`."""
    return list(module._buffers)


def version(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place. Remove when autograd's counter has a public name."""
    return tensor._version


# Remove when `copyreg` makes public what `object.__reduce__` returns.
def swap_class(instance: Any, methods: dict[str, Any], before_pickle: Callable[[], None] = lambda: None) -> type[Any]:
    """Make the class of an instance a subclass with other methods, and return the subclass.

    A pickle (or copy) of the instance has its own class again, so that loading it does not need this package.
    """
    import copyreg

    base = type(instance)

    def __reduce_ex__(this: Any, protocol: Any) -> Any:  # noqa: N807
        before_pickle()
        own = type(this)
        this.__class__ = base
        try:
            parts = this.__reduce_ex__(protocol)
        finally:
            this.__class__ = own
        if parts[0] is not copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
            return parts
        # pickle compares the class in the arguments of `__newobj__` with the swapped class
        return copyreg._reconstructor, (base, object, None), *parts[2:]  # pyright: ignore[reportAttributeAccessIssue]

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, "__slots__": ()}
    members = {**names, **methods, "__reduce_ex__": __reduce_ex__}
    instance.__class__ = swapped = type(base.__name__, (base,), members)
    return swapped


def fsdp_mixed_precision(reduce_dtype: torch.dtype | None) -> Any:
    """Return a `MixedPrecision` of FSDP1 that only sets the dtype in which gradients are reduced.

    With a wrapping policy and any `MixedPrecision`, FSDP1 puts each BatchNorm into its own unit, with a warning, since
    half-precision parameters would break it. Our parameters stay float32, so that is not needed, but the field that
    turns it off is private. Remove when FSDP1 reads `param_dtype` first.
    """
    from torch.distributed.fsdp import MixedPrecision

    return MixedPrecision(
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=(),
    )


@contextlib.contextmanager
def compiled_backward_without_autocast() -> Generator[None]:
    """Let `torch.compile` trace backwards outside autocast inside, as in eager mode.

    By default the compiled backward runs under the forward's autocast, so gradients of fp32 regions are half precision
    (pytorch/pytorch#153044). The switch is private. Remove when its default changes.
    """
    from torch._functorch import config

    before, config.backward_pass_autocast = config.backward_pass_autocast, "off"
    try:
        yield
    finally:
        config.backward_pass_autocast = before


# --- torch: torch.func ---
# Inside `vmap` or `grad` a hook gets wrapped tensors. All tensors that it computes from them stay inside the transform,
# and a tensor hook on them cannot run. There is no public way to get the tensor behind a wrapped one.


_NOTHING = contextlib.nullcontext()


# Remove when module and tensor hooks are called outside of transforms.
def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """Return a context that computes as if no transform of `torch.func` was active."""
    if _functorch.peek_interpreter_stack() is None:
        return _NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()  # pyright: ignore[reportReturnType]


def inside_transforms() -> bool:
    """Return whether a transform of `torch.func` is active. Remove with `outside_transforms`."""
    return _functorch.peek_interpreter_stack() is not None


# Remove with `outside_transforms`.
def behind_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor behind a wrapped one. Inside `vmap` it has the values of the whole batch."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


# Remove when a public way to leave all modes is not ten times as slow.
def outside_dispatch_modes() -> contextlib.AbstractContextManager[None]:
    """Return a context that computes on plain tensors as if no `TorchDispatchMode` was on."""
    if not torch._C._len_torch_dispatch_stack():
        return _NOTHING
    return torch._C._DisableTorchDispatch()


outside_function_modes = torch._C.DisableTorchFunction
"""Context that hides operations from each `TorchFunctionMode` and each tensor's `__torch_function__`.

Remove when torch exports it. The public one leaves the modes on.
"""


WRAPPED_CHILDREN = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names that `torch.compile`, FSDP1 and activation checkpointing add to the qualified names of wrapped modules.

Remove when torch no longer adds them.
"""


# Remove with `WRAPPED_CHILDREN`.
def plain_name(name: str) -> str:
    """Return a qualified name without the names of wrappers: the name before the module was compiled or sharded."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_CHILDREN)


def plain_parameters(module: Any) -> dict[str, Any]:
    """Return the parameters of a module by their :func:`plain_name`. Remove with `WRAPPED_CHILDREN`."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def uncompiled_module(module: Any) -> Any:
    """Return the module inside the result of `torch.compile`, else `None`.

    Remove when torch has a public way to get it.
    """
    from torch._dynamo import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


DispatchMode = TorchDispatchMode
"""Base class of modes that see every operation. Remove when torch exports it from a public module."""

SAME_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Attention on the CPU, and the operation of the same FLOPs in `flop_registry`.

Remove when `flop_registry` has these itself.
"""

RECURRENT = {
    torch.ops.aten._cudnn_rnn: 1,
    torch.ops.aten._cudnn_rnn_backward: 2,
    torch.ops.aten.miopen_rnn: 1,
    torch.ops.aten.miopen_rnn_backward: 2,
    torch.ops.aten.mkldnn_rnn_layer: 1,
    torch.ops.aten.mkldnn_rnn_layer_backward: 2,
}
"""Whole LSTMs and GRUs, with their number of products per weight. Remove when `flop_registry` has them."""
