"""Private names of torch around modules: their dictionaries, compilers, transforms, wrappers; each with its reason."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint_module
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue, reportMissingModuleSource]
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from typing_extensions import final

# --- torch: modules and tensors --------------------------------------------------------------------------------------


def norm_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Find the normalisation layers that keep running statistics. Can go when their common base class is public."""
    from torch.nn.modules.batchnorm import _NormBase

    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


def has_convolutions(module: torch.nn.Module) -> bool:
    """Return whether a part of it is a convolution of any kind. Can go when their common base class is public."""
    from torch.nn.modules.conv import _ConvNd

    return any(isinstance(m, _ConvNd) for m in module.modules())


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dictionary in which a module looks up its own parameters.

    `functional_call` puts tensors into it one by one, with checks and a search for ties. Can go when something public
    puts another dictionary in its place for the length of a call.
    """
    return vars(module)["_parameters"]


def set_own_parameters(module: torch.nn.Module, parameters: dict[str, Any]) -> None:
    """Put another dictionary there. Can go with `own_parameters`."""
    vars(module)["_parameters"] = parameters


def is_transformed_or_traced() -> bool:
    """Return whether a `torch.func` transform or `torch.jit.trace` is looking.

    Neither takes a plain `autograd.Function`. Can go when there is a public question for the first; for the second
    there is one, ten times as slow.
    """
    return torch._C._are_functorch_transforms_active() or bool(torch._C._get_tracing_state())


def is_batched(tensor: Tensor) -> bool:
    """Return whether this is one of the gradients that `torch.autograd.grad(..., is_grads_batched=True)` takes at once.

    Its `vmap` is older than those of `torch.func`, and no question knows of it. Can go when torch has removed it.
    """
    return torch._C._dispatch_keys(tensor).has(torch._C._dispatch_key_parse("Batched"))


def in_forward_mode() -> bool:
    """Return whether a level of forward-mode differentiation is open, in which any tensor may have a tangent.

    Can go when there is a public question for it that does not ask about one tensor.
    """
    return torch.autograd.forward_ad._current_level >= 0


_REPLAYING = (_checkpoint_module._CachingTorchDispatchMode, _checkpoint_module._CachedTorchDispatchMode)


def is_replayed() -> bool:
    """Return whether selective activation checkpointing notes operations, or plays them back in the backward.

    Both times must run the same ones, one by one. Its two modes have no public names. Can go when there is a public
    question for them, or when operations can be hidden from it.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(m, _REPLAYING) for m in _get_current_dispatch_mode_stack())


# Can go when there is one public question for all of them.
def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of this module are compiled, by any of torch's and Lightning's ways, or scripted."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: nothing is compiled
    return (
        (dynamo is not None and isinstance(module, dynamo.OptimizedModule))
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or getattr(module, "_compiler_ctx", None) is not None
        or hasattr(getattr(type(module), "forward", None), "_torchdynamo_orig_callable")
    )


@final
class Flag:
    """Something that has happened or not, shared by copies of an object.

    `set()` works also where `torch.compile` traces: it calls this then, and never again; nothing is in the graph. The
    mark is what `torch.compiler.assume_constant_result` leaves; that one imports the whole compiler. Can go when it
    does not.
    """

    def __init__(self) -> None:
        self.is_set = False

        def set_flag() -> None:  # a function of its own: torch 2.8 passes such a function constants only
            self.is_set = True

        set_flag._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
        self.set = set_flag


def buffer_names(module: torch.nn.Module) -> list[str]:
    """Name a module's own buffers. Can go when `named_buffers` does not leave out those that are `None` as yet."""
    return list(module._buffers)


def version(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place. Can go when autograd's counter has a public name."""
    return tensor._version


# Can go when `copyreg` makes public what `object.__reduce__` returns.
def reduce_as(instance: Any, base: type) -> Any:
    """Pickle (and copy) an instance whose class we swapped as one of its own class, so that no pickle needs us."""
    import copyreg

    return copyreg._reconstructor, (base, object, None), dict(vars(instance))  # pyright: ignore[reportAttributeAccessIssue]


def fsdp_mixed_precision(reduce_dtype: torch.dtype | None) -> Any:
    """Make a `MixedPrecision` of FSDP1 that only says what gradients are reduced in.

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


@final
class CompiledBackwardWithoutAutocast:
    """Lets `torch.compile` trace backwards outside autocast, as eager runs them, for the length of a fit.

    By default the compiled backward runs under the forward's autocast, so gradients of fp32 regions are half precision
    (pytorch/pytorch#153044). The switch is private, and torch 2.8 has none; can go when its default changes.
    """

    def __init__(self) -> None:
        from torch._functorch import config

        self._patch = config.patch(backward_pass_autocast="off")
        self._on = False

    @staticmethod
    def is_possible() -> bool:
        """Return whether there is such a switch."""
        from torch._functorch import config

        return hasattr(config, "backward_pass_autocast")

    def start(self) -> None:
        """Switch it on, where there is a switch."""
        if self.is_possible() and not self._on:
            self._patch.__enter__()
            self._on = True

    def stop(self) -> None:
        """Put the switch back."""
        if self._on:
            self._patch.__exit__(None, None, None)
            self._on = False


# --- torch: torch.func ---
# Inside `vmap` or `grad` a hook sees wrapped tensors: what it computes from them stays inside of the transform, and a
# hook on one cannot run. There is no public way to the tensor behind them.


_NOTHING = contextlib.nullcontext()


# Can go when module and tensor hooks are called outside of transforms.
def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """Compute as if no transform of `torch.func` was under way."""
    if _functorch.peek_interpreter_stack() is None:
        return _NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()  # pyright: ignore[reportReturnType]


def inside_transforms() -> bool:
    """Return whether a transform of `torch.func` is under way. Can go with `outside_transforms`."""
    return _functorch.peek_interpreter_stack() is not None


# Can go with `outside_transforms`.
def behind_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the values: of a batch inside `vmap` all of them."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


# Can go when modes can be left for one operation without a stack of contexts, which takes ten times as long.
def outside_dispatch_modes() -> contextlib.AbstractContextManager[None]:
    """Compute on plain tensors as if no `TorchDispatchMode` was on."""
    if not torch._C._len_torch_dispatch_stack():
        return _NOTHING
    return torch._C._DisableTorchDispatch()


outside_function_modes = torch._C.DisableTorchFunction
"""Context in which no `TorchFunctionMode`, and no `__torch_function__` of a tensor, sees what is measured.

Can go when torch exports it: the public one leaves the modes on.
"""


def watched_backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Do what `loss.backward(...)` does, in the sight of a `TorchFunctionMode`.

    The public ways are calls that such a mode takes, and it sees nothing of what runs inside: neither a Function of the
    user's own nor what activation checkpointing runs again. Can go when a mode stays on in a backward.
    """
    if gradient is None and loss.numel() != 1:
        loss.backward(None, retain_graph, create_graph, inputs)  # which says what is wrong
        return
    gradient = torch.ones_like(loss) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    leaves = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    _engine_run_backward(
        (loss,), (gradient,), keep, create_graph, leaves, allow_unreachable=True, accumulate_grad=True
    )  # fmt: skip


WRAPPED_CHILDREN = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names that `torch.compile`, FSDP1 and activation checkpointing put into the qualified names of what they wrap.

Can go when torch leaves them out of these names.
"""


# Can go with `WRAPPED_CHILDREN`.
def plain_name(name: str) -> str:
    """Return a qualified name without what wrappers put in between: as before the module was compiled or sharded."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_CHILDREN)


def plain_parameters(module: Any) -> dict[str, Any]:
    """Return the parameters of a module by their :func:`plain_name`. Can go with `WRAPPED_CHILDREN`."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def uncompiled_module(module: Any) -> Any:
    """Return the module inside one that `torch.compile` returned, else `None`. Can go when torch has a way to ask."""
    from torch._dynamo import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


DispatchMode = TorchDispatchMode
"""Base of what sees every operation; its module has a private name. Can go when torch exports it elsewhere."""

SAME_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Attention on the CPU, and what `flop_registry` has of the same arguments. Can go when it has these itself."""

RECURRENT = {
    torch.ops.aten._cudnn_rnn: 1,
    torch.ops.aten._cudnn_rnn_backward: 2,
    torch.ops.aten.miopen_rnn: 1,
    torch.ops.aten.miopen_rnn_backward: 2,
    torch.ops.aten.mkldnn_rnn_layer: 1,
    torch.ops.aten.mkldnn_rnn_layer_backward: 2,
}
"""Whole LSTMs and GRUs, and how many products each has by each weight. Can go when `flop_registry` has them."""
