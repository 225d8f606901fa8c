"""Everything outside the optimizer that must not notice a skipped step, for the length of one fit."""

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
    """Schedules, averaged weights and buffers, told what became of each step.

    Args:
        module: The user's.
        named: Buffers to put back besides the statistics of normalisation layers.
        on: Whether steps may be skipped at all. Without, nothing is protected.

    Attributes:
        active: Whether there is anybody to protect; else nobody need ask it in each step.

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
        self._schedules.attach()  # some come, or are replaced, during a fit
        if not self._on:
            self._on = True
            self._averages.attach()
            both = KeptBuffers(norm_places(self._module), counted=True), KeptBuffers(self._named, counted=False)
            self._buffers = [buffers for buffers in both if buffers]
        self.active = bool(self._schedules or self._averages or self._buffers)

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Return whether the host has to know of a skip right after the step of this optimizer."""
        return bool(self._averages) or self._schedules.host_must_know(optimizer)

    @property
    def asks_for_loss(self) -> bool:
        """Return whether it matters if the loss was finite: a bad one leaves NaN in statistics all the same."""
        return bool(self._buffers)

    def enter_step(self, manual: bool, *, on: bool = True) -> None:
        """Prepare for a training step, from which on steps may be skipped, or may not (`on=False`)."""
        if not on:
            if self._on:
                self.detach()
            return
        self._inside_manual_step = manual
        self._attach()
        for buffers in self._buffers:
            buffers.enter_step()

    def leave_step(self) -> None:
        """Note its end (in automatic optimization its backward and optimizer step are still to come)."""
        self._inside_manual_step = False

    def note_backward(self) -> None:
        """Note that it had a backward: its optimizer step will decide."""
        for buffers in self._buffers:
            buffers.note_backward()

    def before_step(self, optimizer: Optimizer) -> None:
        """Decide what an optimizer needs to know before it steps: its rate."""
        self._schedules.before_step(optimizer)

    def observe(self, optimizer: Optimizer, result: StepResult) -> None:
        """Hold, or put back, what must not notice the step if it was skipped."""
        self._schedules.observe(optimizer, result.skip)
        if self._averages:
            self._averages.observe(result.skip)
        for buffers in self._buffers:
            buffers.observe(result, self._inside_manual_step)

    def settle(self) -> None:
        """Leave everything as it ought to be for somebody who looks now: validation, or a checkpoint."""
        for buffers in self._buffers:
            buffers.settle()

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Take what an overflow wrote out of the module's entries in a checkpoint that is saved within a window.

        The window cannot be dropped any more where the checkpoint is loaded: its gradients are not in there. Finite
        values stay, as in fp32. Entries are replaced, never written into. Waits for the device if a window is open.
        """
        for buffers in self._buffers:
            buffers.mend(state_dict)

    def detach(self) -> None:
        """Leave the user's objects as they were."""
        self.settle()
        self._buffers = []
        self._on = self.active = False
        self._schedules.detach()
        self._averages.detach()
