"""Clipping of true gradients, also where they are sharded over more than one device mesh, or only some of them are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp._compat import _lightning
from lightning_amp.scaling import OptimizerSteps


class Clipping(MixedPrecision):
    """Clips whatever mixture of plain and sharded gradients an optimizer has.

    Torch's own functions take gradients of one device mesh, or of none.
    """

    _steps: OptimizerSteps

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        optimizer = _lightning.unwrap_optimizer(optimizer)
        self._steps.unscale_(optimizer)
        if clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self._steps.before_clamping(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
        elif clip_val > 0:
            self.clip_grad_by_norm(optimizer, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """As `torch.nn.utils.clip_grad_norm_`.

        The norm is that of all gradients, whole, as if nothing were sharded: the same on all ranks.

        Args:
            optimizer: Whose parameters.
            clip_val: Largest 2-norm.

        """
        groups = _by_mesh(self.main_params(optimizer))
        if len(groups) == 1:
            torch.nn.utils.clip_grad_norm_(groups[0], clip_val)
        elif groups:
            norms = [_whole(torch.nn.utils.get_total_norm([p.grad for p in g if p.grad is not None])) for g in groups]
            total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
            for group in groups:
                torch.nn.utils.clip_grads_with_norm_(group, clip_val, total)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """As `torch.nn.utils.clip_grad_value_`.

        Args:
            optimizer: Whose parameters.
            clip_val: Largest magnitude of an element.

        """
        for group in _by_mesh(self.main_params(optimizer)):
            for parameter in group:
                parameter.grad = _added_up(parameter.grad)
            torch.nn.utils.clip_grad_value_(group, clip_val)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that have gradients: together those that are sharded over the same mesh, or are not sharded."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _added_up(grad: Any) -> Any:
    """Sequence parallelism leaves sums that are still to be added over the ranks, whose elements cannot be clipped."""
    if not any(placement.is_partial() for placement in getattr(grad, "placements", ())):
        return grad
    from torch.distributed.tensor import Replicate

    return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])


def _whole(norm: Tensor) -> Tensor:
    """The norm of sharded gradients is itself a sharded tensor, of shape []."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # pyright: ignore[reportAttributeAccessIssue]
