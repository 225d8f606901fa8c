"""Clip the true gradients of an optimizer, plain and sharded ones together, or leave clipping to a fused optimizer.

Torch's own functions accept either unsharded gradients, or sharded gradients of a single device mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp._compat._names import Callback, GradClipAlgorithmType, LightningModule


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip like `torch.nn.utils.clip_grad_norm_`, by the norm of all gradients, whether sharded or not."""
    groups = _by_mesh(parameters)
    norms: list[Any] = [torch.nn.utils.get_total_norm([p.grad for p in g if p.grad is not None]) for g in groups]
    whole: list[Tensor] = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, joint_norm(whole))


def joint_norm(norms: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all parts from the norm [] of each part."""
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.linalg.vector_norm(together) if len(norms) > 1 else norms[0]


def clip_by_value(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Clip like `torch.nn.utils.clip_grad_value_`."""
    for group in _by_mesh(parameters):
        torch.nn.utils.clip_grad_value_(group, max_value)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters that have gradients by the device mesh over which they are sharded, if any.

    Gradients that sequence parallelism leaves as one summand per rank are added up. Clipping by value needs the sum,
    because the elements of one summand are not the elements of the gradient. Clipping by norm could do without, but up
    to torch 2.11, multiplying such a `DTensor` in place has no effect.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        if any(placement.is_partial() for placement in getattr(grad, "placements", ())):
            from torch.distributed.tensor import Replicate

            whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
            parameter.grad = grad.redistribute(placements=whole)
        groups.setdefault(getattr(grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


# -- as one pass with the step -----------------------------------------------------------------------------------------


@final
class FoldPlan:
    """Decides whether unscale, clip and step may run as one pass, because no hook reads gradients in between.

    It depends on the methods that the module, the callbacks and the plugin override. `own_norm`: a subclass of the
    plugin clips by norm in its own way.
    """

    def __init__(self, module: LightningModule, own_norm: bool) -> None:
        self._trainer: Any = module.trainer
        self._module, self._own_norm = module, own_norm
        self._look()

    def _look(self) -> None:
        self._callbacks: list[Callback] = list(self._trainer.callbacks)
        self.somebody_sees_backward = self._overridden("on_before_backward") or self._overridden("on_after_backward")
        self.somebody_looks = self._overridden("on_before_optimizer_step")
        self.own_clipping = not is_default(self._module, "configure_gradient_clipping", LightningModule)

    def _overridden(self, hook: str) -> bool:
        owners = [(self._module, LightningModule), *((callback, Callback) for callback in self._callbacks)]
        return not all(is_default(owner, hook, base) for owner, base in owners)

    def current(self) -> FoldPlan:
        """Return the plan. It is made again if callbacks were added or removed, which can also happen during a fit."""
        if self._callbacks != self._trainer.callbacks:
            self._look()
        return self

    def fold(self) -> tuple[bool, float | None]:
        """Return whether no hook reads the gradients before the step, and the norm to clip them to."""
        automatic = self._module.automatic_optimization
        if self.somebody_looks or (automatic and self.own_clipping):
            return False, None
        # Lightning does not clip in manual optimization, where the user's clipping unscales first
        max_norm = self._trainer.gradient_clip_val if automatic else None
        if not max_norm or max_norm <= 0:
            return True, None
        by_norm = self._trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE
        return by_norm and not self._own_norm, float(max_norm)


def is_default(owner: object, name: str, base: type) -> bool:
    """Return whether a method is the base class's own, neither overridden nor replaced on the instance."""
    return getattr(getattr(owner, name), "__func__", None) is getattr(base, name)
