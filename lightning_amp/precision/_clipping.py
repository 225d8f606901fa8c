"""Clip the true gradients of an optimizer, plain and sharded ones together, or leave clipping to a fused optimizer.

Torch's own functions accept either unsharded gradients, or sharded gradients of a single device mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


def somebody_looks(module: LightningModule) -> bool:
    """Return whether a hook reads the gradients before a step; callbacks may come and go during a fit."""
    trainer: Any = module.trainer
    owners = [(module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)]
    return not all(is_default(owner, "on_before_optimizer_step", base) for owner, base in owners)


def clips_itself(module: LightningModule) -> bool:
    """Return whether the module clips its gradients in a way of its own."""
    return not is_default(module, "configure_gradient_clipping", LightningModule)


def fold_plan(module: LightningModule, own_norm: bool) -> tuple[bool, float | None]:
    """Return whether unscale, clip and step may run as one pass, and the norm to clip to.

    They may if no hook reads the gradients in between. `own_norm`: a subclass of the plugin clips by norm in its own
    way.
    """
    trainer: Any = module.trainer
    automatic = module.automatic_optimization
    if somebody_looks(module) or (automatic and clips_itself(module)):
        return False, None
    # Lightning does not clip in manual optimization, where the user's clipping unscales first
    max_norm = trainer.gradient_clip_val if automatic else None
    if not max_norm or max_norm <= 0:
        return True, None
    by_norm = trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE
    return by_norm and not own_norm, float(max_norm)


def is_default(owner: object, name: str, base: type) -> bool:
    """Return whether a method is the base class's own, neither overridden nor replaced on the instance."""
    return getattr(getattr(owner, name), "__func__", None) is getattr(base, name)
