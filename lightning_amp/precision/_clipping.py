"""Clip the true gradients of an optimizer, plain and sharded ones together, or leave clipping to a fused optimizer.

Torch's own functions accept either unsharded gradients, or sharded gradients of a single device mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from typing_extensions import final


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip like `torch.nn.utils.clip_grad_norm_`, by the norm of all gradients, whether sharded or not."""
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
    """Clip like `torch.nn.utils.clip_grad_value_`."""
    groups = _by_mesh(parameters)
    _add_up(groups)
    for group in groups:
        torch.nn.utils.clip_grad_value_(group, max_value)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters that have gradients by the device mesh over which they are sharded, if any."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _add_up(groups: list[list[nn.Parameter]]) -> None:
    """Add up gradients that sequence parallelism leaves as one summand per rank.

    Clipping by value needs the sum, because the elements of one summand are not the elements of the gradient. Clipping
    by norm could do without the sum, but up to torch 2.11, multiplying such a `DTensor` in place has no effect.
    """
    for parameter in (p for group in groups for p in group):
        grad: Any = parameter.grad
        if any(placement.is_partial() for placement in getattr(grad, "placements", ())):
            from torch.distributed.tensor import Replicate

            parameter.grad = grad.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in grad.placements]
            )


def _whole(norm: Tensor) -> Tensor:
    """Gather a norm, which is a sharded tensor of shape [] if the gradients are sharded."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # pyright: ignore[reportAttributeAccessIssue]


# -- as one pass with the step -----------------------------------------------------------------------------------------


@final
class FoldPlan:
    """Decides whether unscale, clip and step may run as one pass, because no hook reads gradients in between.

    It depends on the methods that the module, the callbacks and the plugin override. `own_norm`: a subclass of the
    plugin clips by norm in its own way.
    """

    def __init__(self, module: LightningModule, own_norm: bool) -> None:
        self._trainer = module.trainer
        self._automatic = module.automatic_optimization
        self._module = module
        self._own_norm = own_norm
        self._look()

    def _look(self) -> None:
        self._callbacks: list[Callback] = list(self._trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        self.somebody_sees_backward = self._overridden("on_before_backward") or self._overridden("on_after_backward")
        self.somebody_looks = self._overridden("on_before_optimizer_step")
        self.own_clipping = not is_default(self._module, "configure_gradient_clipping", LightningModule)

    def _overridden(self, hook: str) -> bool:
        return not (
            is_default(self._module, hook, LightningModule)
            and all(is_default(c, hook, Callback) for c in self._callbacks)
        )

    def current(self) -> FoldPlan:
        """Return the plan. It is made again if callbacks were added or removed, which can also happen during a fit."""
        if self._callbacks != self._trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            self._look()
        return self

    def fold(self) -> tuple[bool, float | None]:
        """Return whether no hook reads the gradients before the step, and the norm to clip them to."""
        if self.somebody_looks:
            return False, None
        if not self._automatic:
            return True, None  # Lightning does not clip in manual optimization; the user's clipping unscales first
        if self.own_clipping:
            return False, None
        clip_val = self._trainer.gradient_clip_val
        if not clip_val or clip_val <= 0:
            return True, None
        algorithm = self._trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
        return algorithm == GradClipAlgorithmType.NORM and not self._own_norm, float(clip_val)


def is_default(owner: object, name: str, base: type) -> bool:
    """Return whether a method is the base class's own, neither overridden nor replaced on the instance."""
    return getattr(getattr(owner, name), "__func__", None) is getattr(base, name)
