"""The changes that `doctor` tries on a training step: a fused optimizer, another layout of images, a larger batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp._compat import _torch
from lightning_amp.shadow import copy_batch


def fuse_optimizers(module: LightningModule) -> LightningModule:
    """Turn on `fused=True` in the optimizers that this module configures.

    This changes the module, so pass a copy and not the user's object.
    """
    configure = module.configure_optimizers

    def configure_optimizers() -> Any:
        found = configure()
        for optimizer in _optimizers_in(found):
            if can_fuse(optimizer):
                _fuse(optimizer)
        return found

    vars(module)["configure_optimizers"] = configure_optimizers
    return module


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Turn on `fused=True` in an optimizer that has not stepped yet.

    The optimizer stays the same object, because schedules refer to it.
    """
    groups: list[Any] = optimizer.param_groups
    for group in groups:
        group.update(fused=True, foreach=False)
    legal = inspect.signature(type(optimizer)).parameters
    settings: Any = {name: value for name, value in optimizer.defaults.items() if name in legal}
    make: Any = type(optimizer).__init__
    make(optimizer, groups, **{**settings, "fused": True, "foreach": False})


def can_fuse(optimizer: Any) -> bool:
    """Return whether this optimizer could use a fused kernel of torch but does not."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    if type(optimizer) not in kinds or _torch.is_fused(optimizer):
        return False
    groups = optimizer.param_groups
    if any(group.get("differentiable") or group.get("foreach") for group in groups):
        return False
    parameters = [parameter for group in groups for parameter in group["params"]]
    kinds_of_device = ["cpu"] if type(optimizer) is torch.optim.Adagrad else _fused_device_types()
    return all(p.is_floating_point() and p.device.type in kinds_of_device for p in parameters)


def _optimizers_in(found: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(found, torch.optim.Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from _optimizers_in(found.get("optimizer"))
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _optimizers_in(item)


def has_convolutions(module: nn.Module) -> bool:
    """Return whether a module has convolutions over images."""
    return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in module.modules())


def joined(batches: Sequence[Any], times: int) -> list[Any] | None:
    """Join copies of batches into one batch that is `times` as large; `None` if their contents cannot be joined."""
    if not batches:
        return None
    parts = [copy_batch(batches[i % len(batches)]) for i in range(times)]
    try:
        return [_join(parts)]
    except (ValueError, TypeError, RuntimeError):
        return None


def _join(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        if not first.dim():
            raise ValueError("a scalar has no rows")
        return torch.cat(list(parts))
    if type(first) is dict:
        return {name: _join([part[name] for part in parts]) for name in first}
    if type(first) in (list, tuple):
        if not all(isinstance(item, (Tensor, dict, list, tuple)) for item in first):
            raise ValueError("only tensors in dicts, lists and tuples can be joined")
        return type(first)(_join(items) for items in zip(*parts, strict=True))
    raise ValueError(f"{type(first).__name__} cannot be joined")


# Remove when torch has a public list.
def _fused_device_types() -> list[str]:
    """Return the types of devices for which torch has fused optimizers."""
    from torch.utils import _foreach_utils

    return _foreach_utils._get_fused_kernels_supported_devices()
