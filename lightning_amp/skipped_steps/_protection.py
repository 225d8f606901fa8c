"""Undo skipped steps outside the optimizer, for one fit: in schedules, averaged weights and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp.scaling import StepResult
from lightning_amp.skipped_steps._averages import HeldAverages
from lightning_amp.skipped_steps._kept_buffers import KeptBuffers
from lightning_amp.skipped_steps._named_buffers import BufferPlace, norm_places
from lightning_amp.skipped_steps._schedules import HeldSchedules


@final
class SkipProtection:
    """Holds back schedules and averaged weights, and restores buffers, after each skipped step.

    Args:
        module: The user's module.
        named: Buffers to restore besides the statistics of normalisation layers.
        on: Whether steps may be skipped at all. If steps are never skipped, nothing is protected.

    Attributes:
        active: Whether there is anything to protect. If there is nothing to protect, callers need not call the other
            methods in each step.

    """

    def __init__(self, module: LightningModule, named: Sequence[BufferPlace] = (), *, on: bool = True) -> None:
        self._module, self._named = module, named
        self._inside_manual_step = False
        self._schedules = HeldSchedules(module)
        self._averages = HeldAverages(module.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        self._buffers: list[KeptBuffers] = []
        self._on = self.active = False
        if on:
            self._attach()

    def _attach(self) -> None:
        self._schedules.attach()  # some schedulers are made or replaced during a fit
        if not self._on:
            self._on = True
            self._averages.attach()
            both = KeptBuffers(norm_places(self._module), counted=True), KeptBuffers(self._named, counted=False)
            self._buffers = [buffers for buffers in both if buffers]
        self.active = bool(self._schedules or self._averages or self._buffers)

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Return whether the host needs the skip flag right after the step of this optimizer."""
        return bool(self._averages) or self._schedules.host_must_know(optimizer)

    @property
    def asks_for_loss(self) -> bool:
        """Return whether steps must report a non-finite loss: it leaves NaN in buffers even if they are applied."""
        return bool(self._buffers)

    def enter_step(self, manual: bool, *, on: bool = True) -> None:
        """Prepare for a training step. With `on=False`, steps can no longer be skipped, so nothing is protected."""
        if not on:
            if self._on:
                self.detach()
            return
        self._inside_manual_step = manual
        self._attach()
        for buffers in self._buffers:
            buffers.enter_step()

    def leave_step(self) -> None:
        """Record the end of a training step. In automatic optimization its backward and optimizer step come later."""
        self._inside_manual_step = False

    def note_backward(self) -> None:
        """Record that the training step had a backward, so an optimizer step will follow."""
        for buffers in self._buffers:
            buffers.note_backward()

    def before_step(self, optimizer: Optimizer) -> None:
        """Decide the pending schedule steps of an optimizer that is about to step."""
        self._schedules.before_step(optimizer)

    def observe(self, optimizer: Optimizer, result: StepResult) -> None:
        """Undo the step in schedules, averaged weights and buffers if it was skipped."""
        self._schedules.observe(optimizer, result.skip)
        if self._averages:
            self._averages.observe(result.skip)
        for buffers in self._buffers:
            buffers.observe(result, self._inside_manual_step)

    def settle(self) -> None:
        """Remove non-finite values from buffers before validation or a checkpoint reads them."""
        for buffers in self._buffers:
            buffers.settle()

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Replace non-finite values of an overflow in a checkpoint that is saved within a window.

        The run that loads the checkpoint cannot drop the window, since the checkpoint has no gradients. Finite values
        stay, as in fp32. Entries are replaced, never written into. This waits for the device if a window is open.
        """
        for buffers in self._buffers:
            buffers.mend(state_dict)

    def detach(self) -> None:
        """Restore the user's objects."""
        self.settle()
        self._buffers = []
        self._on = self.active = False
        self._schedules.detach()
        self._averages.detach()
