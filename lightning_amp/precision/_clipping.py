"""Clip true gradients, whatever mixture of plain and sharded ones an optimizer has.

Torch's own functions take gradients of one device mesh, or of none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip as `torch.nn.utils.clip_grad_norm_`.

    The norm is that of all gradients, whole, as if nothing were sharded: the same on all ranks.

    Args:
        parameters: Of one optimizer.
        max_norm: Largest 2-norm.

    """
    groups = _by_mesh(parameters)
    _add_up(groups)
    if len(groups) == 1:
        torch.nn.utils.clip_grad_norm_(groups[0], max_norm)
    elif groups:
        norms = [_whole(torch.nn.utils.get_total_norm([p.grad for p in g if p.grad is not None])) for g in groups]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)


def clip_by_value(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Clip as `torch.nn.utils.clip_grad_value_`.

    Args:
        parameters: Of one optimizer.
        max_value: Largest magnitude of an element.

    """
    groups = _by_mesh(parameters)
    _add_up(groups)
    for group in groups:
        torch.nn.utils.clip_grad_value_(group, max_value)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters that have gradients: together those that are sharded over the same mesh, or are not sharded."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _add_up(groups: list[list[nn.Parameter]]) -> None:
    """Add up what sequence parallelism leaves as sums over the ranks.

    Elements of a summand cannot be clipped by value. Gradients could by their norm, but up to torch 2.11 a `DTensor`
    that is such a sum stays as it is when it is multiplied in place.
    """
    for parameter in (p for group in groups for p in group):
        grad: Any = parameter.grad
        if any(placement.is_partial() for placement in getattr(grad, "placements", ())):
            from torch.distributed.tensor import Replicate

            parameter.grad = grad.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in grad.placements]
            )


def _whole(norm: Tensor) -> Tensor:
    """Gather a norm: that of sharded gradients is itself a sharded tensor, of shape []."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # pyright: ignore[reportAttributeAccessIssue]
