"""Everything outside the optimizer that must not notice a skipped step, for the length of one fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from typing_extensions import final

from lightning_amp.scaling import StepResult
from lightning_amp.skipped_steps._averages import HeldAverages
from lightning_amp.skipped_steps._named_buffers import BufferPlace
from lightning_amp.skipped_steps._norm_statistics import StatisticsRollback
from lightning_amp.skipped_steps._schedules import HeldSchedules


@final
class SkipProtection:
    """Schedules, averaged weights and buffers, told what became of each step.

    Args:
        module: The user's.
        named: Buffers to put back besides the statistics of normalisation layers.

    """

    def __init__(self, module: LightningModule, named: Sequence[BufferPlace] = ()) -> None:
        self._inside_manual_step = False
        self._schedules = HeldSchedules(module)
        self._averages = HeldAverages(module.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        self._statistics = StatisticsRollback(module, named)
        self._schedules.attach()
        self.active = bool(self._schedules or self._averages or self._statistics)
        """Whether there is anybody to protect."""

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Return whether the host has to know of a skip right after the step of this optimizer."""
        return bool(self._averages) or self._schedules.host_must_know(optimizer)

    @property
    def asks_for_loss(self) -> bool:
        """Return whether it matters if the loss was finite: a bad one leaves NaN in statistics all the same."""
        return bool(self._statistics)

    def before_step(self, optimizer: Optimizer) -> None:
        """Decide what an optimizer needs to know before it steps: its rate."""
        self._schedules.before_step(optimizer)

    def observe(self, optimizer: Optimizer, result: StepResult) -> None:
        """Hold, or put back, what must not notice the step if it was skipped."""
        self._schedules.observe(optimizer, result.skip)
        if self._averages:
            self._averages.observe(result.skip)
        if self._statistics:
            self._statistics.observe(result, self._inside_manual_step)

    def enter_step(self, manual: bool) -> None:
        """Prepare for a training step."""
        self._inside_manual_step = manual
        self._schedules.attach()  # some come, or are replaced, during a fit
        self.active = bool(self._schedules or self._averages or self._statistics)
        if self._statistics:
            self._statistics.enter_step()

    def leave_step(self) -> None:
        """Note its end (in automatic optimization its backward and optimizer step are still to come)."""
        self._inside_manual_step = False

    def note_backward(self) -> None:
        """Note that it had a backward."""
        self._statistics.note_backward()

    def settle(self) -> None:
        """Leave everything as it ought to be for somebody who looks now: validation, or a checkpoint."""
        if self._statistics:
            self._statistics.settle()

    def mend(self, state_dict: dict[str, Any]) -> None:
        """Take what an overflow wrote out of the module's entries in a checkpoint."""
        self._statistics.mend(state_dict)

    def detach(self) -> None:
        """Leave the user's objects as they were."""
        self.settle()
        self._schedules.detach()
        self._averages.detach()
