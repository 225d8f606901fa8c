"""Turn on `fused=True` in optimizers."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lightning_amp._compat import _torch


def can_fuse(optimizer: Any) -> bool:
    """Return whether this optimizer could use a fused kernel of torch but does not."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    groups = getattr(optimizer, "param_groups", ())
    if type(optimizer) not in kinds or _torch.is_fused(optimizer):
        return False
    if any(group.get("differentiable") or group.get("foreach") for group in groups):
        return False
    devices = ["cpu"] if type(optimizer) is torch.optim.Adagrad else _fused_device_types()
    return all(p.is_floating_point() and p.device.type in devices for group in groups for p in group["params"])


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that has not stepped yet anew; it stays the same object, because schedules refer to it."""
    groups: list[Any] = optimizer.param_groups
    for group in groups:
        group.update(fused=True, foreach=False)
    legal = inspect.signature(type(optimizer)).parameters
    settings: Any = {name: value for name, value in optimizer.defaults.items() if name in legal}
    make: Any = type(optimizer).__init__
    make(optimizer, groups, **{**settings, "fused": True, "foreach": False})


# Remove when torch has a public list.
def _fused_device_types() -> list[str]:
    """Return the types of devices for which torch has fused optimizers."""
    from torch.utils import _foreach_utils

    return _foreach_utils._get_fused_kernels_supported_devices()
