"""Collective operations: which operations they are, their groups, and the store by which the ranks found each other."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def store(prefix: str) -> Any:
    """Return the store by which the ranks found each other, for keys with a prefix. Remove when torch exports it."""
    return torch.distributed.PrefixStore(prefix, torch.distributed.distributed_c10d._get_default_store())


@functools.cache
def _group_argument(operation: Any) -> tuple[int, bool] | None:
    namespace, name = getattr(operation, "namespace", ""), str(getattr(operation, "__name__", ""))
    if namespace not in ("c10d", "_c10d_functional") or name.startswith(("send", "recv")):
        return None
    for i, argument in enumerate(operation._schema.arguments):
        if argument.name == "group_name" or str(argument.type).endswith("ProcessGroup"):
            return i, argument.name == "group_name"
    return None


def process_group(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return the process group of a collective operation; `None` for all others, and between two ranks.

    Remove when torch tags collective operations.
    """
    found = _group_argument(operation)
    if found is None:
        return None
    position, by_name = found
    group = args[position] if position < len(args) else kwargs[operation._schema.arguments[position].name]
    if by_name:
        return torch.distributed.distributed_c10d._resolve_process_group(group)
    return torch.distributed.ProcessGroup.unbox(group)


_MODULES = ("torch._ops._c10d_functional", "torch.distributed.distributed_c10d")


def takes_values_of_others(operation: Any) -> bool:
    """Return whether the result of an operation depends on values of other ranks.

    Remove when torch tags collective operations.
    """
    module, name = str(getattr(operation, "__module__", "")), str(getattr(operation, "__name__", ""))
    return module.startswith(_MODULES) and not name.startswith(("wait_tensor", "_wrap_tensor"))


def is_function_of_torch(node: Any) -> bool:
    """Return whether an autograd node is a Function that torch wrote for collective operations.

    Remove when torch tags collective operations.
    """
    forward = getattr(type(node), "_forward_cls", None)
    return str(getattr(forward, "__module__", "")).startswith("torch.distributed.")


@torch.no_grad()
def arrived(result: Tensor) -> Tensor:
    """Wait until a result has arrived, if a functional collective operation made it. It stays the same tensor.

    Remove when torch exports `wait_tensor`.
    """
    return torch.ops._c10d_functional.wait_tensor(result)
