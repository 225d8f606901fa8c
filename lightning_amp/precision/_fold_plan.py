"""Decide whether unscale, clip and step may run as one pass: nobody looks at gradients in between."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from typing_extensions import final


@final
class FoldPlan:
    """Answers, until callbacks come or go, from what the module, the callbacks and the plugin override.

    Args:
        module: The user's.
        own_norm: Whether the plugin clips by norm in a way of its own.

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
        """Return the plan, looked at anew if callbacks came or went, as some do during a fit."""
        if self._callbacks != self._trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            self._look()
        return self

    def fold(self) -> tuple[bool, float | None]:
        """Return whether nobody looks at the gradients before the step, and the norm to clip them to."""
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
