"""Report rules of `fp32_modules` without effect, because the `forward` of the matching modules never runs."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from typing_extensions import final

from lightning_amp import _messages
from lightning_amp._text import counted, named
from lightning_amp.casting import Fp32Modules

ENOUGH_STEPS = 100
"""A module that has not run after this number of training steps is reported as never running."""


@final
class IdleRules:
    """Warns once in a fit of rules that had no effect.

    A module may run in some batches only, or only in validation. So it waits for `ENOUGH_STEPS` training steps, and for
    the first validation if there is one. In a shorter fit it warns at the end.
    """

    def __init__(self, module: LightningModule, fp32_modules: Fp32Modules) -> None:
        self._trainer = module.trainer
        self._fp32_modules = fp32_modules
        self._steps = 0
        self._evaluated = False
        self._done = False

    def before_training_step(self) -> None:
        """Warn, if enough steps have run."""
        if self._steps >= ENOUGH_STEPS and not self._done and (self._evaluated or not self._trainer.enable_validation):
            self.say()
        self._steps += 1

    def after_evaluation_step(self) -> None:
        """Record that a validation ran."""
        self._evaluated = True

    def say(self) -> None:
        """Warn of modules that have not run in the steps so far, unless this was done before."""
        if self._done or self._steps == 0:
            return
        self._done = True
        steps = counted(self._steps, "training step")
        rules, others = self._fp32_modules.idle()
        if rules:
            names = [name for found in rules.values() for name in found]
            inside = next((name for name in names if self._fp32_modules.has_children(name)), None)
            child = f", such as '{inside}.*'" if inside else ""
            said = ", ".join(repr(rule) if isinstance(rule, str) else rule.__name__ for rule in rules)
            _messages.warn(
                f"lightning_amp: `fp32_modules` has no effect so far for {said}: the `forward` of {named(names)} has"
                f" not run in {steps}. Other methods of a module, and uses of its weight alone, are not in fp32. Call"
                f" the module itself, match a module inside or around it whose `forward` runs{child}, or"
                " put that code into `with lightning_amp.precision.fp32_region():`."
            )
        if others:
            _messages.info(
                f"lightning_amp: `fp32_modules` also matches {named(others)}, whose `forward` has not run in {steps}."
                " Match the module that uses the weight too, as `nn.MultiheadAttention` uses its `out_proj`, if that"
                " shall compute in fp32."
            )
