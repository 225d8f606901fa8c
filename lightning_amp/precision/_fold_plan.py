"""Who looks at what between backward and step. Where nobody does, less has to be done."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_amp.precision._clipping import Clipping


class HookGate:
    """Answers, until callbacks come or go, from what the module, the callbacks and the plugin override.

    Args:
        plugin: A subclass that overrides clipping by norm closes the gate where there is clipping.
        module: The user's.

    """

    def __init__(self, plugin: Clipping, module: LightningModule) -> None:
        self._trainer = module.trainer
        self._automatic = module.automatic_optimization
        self._module = module
        self._callbacks: list[Callback] = list(self._trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        self.somebody_sees_backward = self._overridden("on_before_backward") or self._overridden("on_after_backward")
        self.somebody_looks = self._overridden("on_before_optimizer_step")
        self.own_clipping = not _is_default(module, "configure_gradient_clipping", LightningModule)
        self._own_norm = not _is_default(plugin, "clip_grad_by_norm", Clipping)

    def _overridden(self, hook: str) -> bool:
        return not (
            _is_default(self._module, hook, LightningModule)
            and all(_is_default(c, hook, Callback) for c in self._callbacks)
        )

    def is_current(self) -> bool:
        """Whether the callbacks are those that were asked; some come or go during a fit."""
        return self._callbacks == self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]

    def fold(self) -> tuple[bool, float | None]:
        """Whether nobody looks at the gradients before the step, and the norm to clip them to."""
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


def _is_default(owner: object, name: str, base: type) -> bool:
    """Whether the method is the base class's own, neither overridden nor replaced on the instance."""
    return getattr(getattr(owner, name), "__func__", None) is getattr(base, name)
