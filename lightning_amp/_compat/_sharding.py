"""Private names of torch around sharded modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a `DTensor`, always the same object, and any other tensor unchanged.

    A tensor that still arrives from other ranks is waited for. The public `to_local` returns a new view, and autograd
    records it. Remove when it does neither.
    """
    part: Any = getattr(tensor, "_local_tensor", tensor)
    return part.trigger_wait() if hasattr(part, "trigger_wait") else part


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is a unit of FSDP1, which calls the module inside.

    Remove when FSDP1 is removed from torch.
    """
    return type(module).__name__ == "FullyShardedDataParallel"


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`. Remove when importing its class does not import all of them."""
    return hasattr(tensor, "_local_tensor")


def is_sharded_module(module: nn.Module) -> bool:
    """Return whether any part of a module is sharded. Remove when FSDP1 is removed from torch."""
    from torch.distributed.fsdp import FSDPModule

    is_unit = any(isinstance(part, FSDPModule) or is_wrapper(part) for part in module.modules())
    return is_unit or any(map(is_sharded, module.parameters()))


def param_groups(state: Any) -> list[Any]:
    """Return FSDP2's groups of parameters of one unit; one, or none, up to torch 2.11. Remove when they are public."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def unsynchronised_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that FSDP2 keeps of backwards without synchronisation, for these sharded parameters.

    A loss scale that moves in between has to rescale them. Remove when `FSDPModule` returns them.
    """
    from torch.distributed import _composable_state

    mine = {id(parameter) for parameter in parameters}
    states: list[Any] = [state() for state in _composable_state._module_state_mapping.values()]
    every = [group for state in states if hasattr(state, "_fsdp_param_group") for group in param_groups(state)]
    groups = [group for group in every if any(id(param.sharded_param) in mine for param in group.fsdp_params)]
    params = [param for group in groups for param in group.fsdp_params if id(param.sharded_param) in mine]
    whole = [getattr(getattr(param, "_unsharded_param", None), "grad", None) for param in params]
    reduced = [group._partial_reduce_output for group in groups]  # over the shards, not yet over the replicas
    kept = [*(param.unsharded_accumulated_grad for param in params), *whole, *reduced]
    return [local(gradient) for gradient in {id(g): g for g in kept if g is not None}.values()]  # torch 2.15 has one
