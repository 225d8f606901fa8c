"""Private names of torch around sharded modules."""

from __future__ import annotations

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
