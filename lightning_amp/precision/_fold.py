"""May unscaling, clipping and the fused update be one pass? Only if nobody looks at the gradients in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from lightning_amp import _compat

if TYPE_CHECKING:
    from lightning_amp.precision._amp import AmpPrecision


class FoldGate:
    """Answers for one fit, from what the module, the callbacks and the plugin override.

    Args:
        plugin: A subclass that overrides clipping closes the gate.
        module: The user's.

    """

    def __init__(self, plugin: AmpPrecision, module: LightningModule) -> None:
        self._trainer = module.trainer
        self._automatic = module.automatic_optimization
        hook = "on_before_optimizer_step"
        callbacks: list[Callback] = self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._somebody_looks = not _is_default(module, hook, LightningModule) or not all(
            _is_default(callback, hook, Callback) for callback in callbacks
        )
        self._own_clipping = not (
            _is_default(module, "configure_gradient_clipping", LightningModule)
            and _is_default(plugin, "clip_grad_by_norm", MixedPrecision)
        )

    def __call__(self, optimizer: Optimizer) -> tuple[bool, float | None]:
        """Whether to fold, and the norm to clip to."""
        if self._somebody_looks or not _compat.decides_on_device(optimizer):
            return False, None
        if not self._automatic:
            return True, None  # Lightning does not clip in manual optimization; the user's clipping unscales first
        clip_val = self._trainer.gradient_clip_val
        if self._own_clipping:
            return False, None
        if not clip_val or clip_val <= 0:
            return True, None
        algorithm = self._trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
        return algorithm == GradClipAlgorithmType.NORM, float(clip_val)


def _is_default(owner: object, name: str, base: type) -> bool:
    """Whether the method is the base class's own, neither overridden nor replaced on the instance."""
    return getattr(getattr(owner, name), "__func__", None) is getattr(base, name)
