"""Everything outside the optimizer that must not notice a skipped step, for the length of one fit."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_amp.scaling import OptimizerSteps, Outcome
from lightning_amp.skipped_steps._averages import AveragingGate
from lightning_amp.skipped_steps._named_buffers import Place
from lightning_amp.skipped_steps._schedules import ScheduleGate
from lightning_amp.skipped_steps._statistics import BufferGuard


class FitGuards:
    """Schedules, averaged weights and buffers, told of each outcome.

    Args:
        module: The user's.
        steps: Whose outcomes.
        named: Buffers to put back besides the statistics of normalisation layers.

    """

    def __init__(self, module: LightningModule, steps: OptimizerSteps, named: Sequence[Place] = ()) -> None:
        self._steps = steps
        self._inside_manual_step = False
        self.schedules = ScheduleGate(module)
        self.averaging = AveragingGate(module.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        self.buffers = BufferGuard(module, named)
        self._listen()

    def _listen(self) -> None:
        self.schedules.attach()
        # who has nothing to protect is not asked in each step
        self._steps.guards = self if self.schedules or self.averaging or self.buffers else None

    def host_must_know(self, optimizer: Optimizer) -> bool:
        """Whether the outcome of this optimizer's step is needed at once."""
        return bool(self.averaging) or self.schedules.host_must_know(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        self.schedules.before_step(optimizer)

    def observe(self, outcome: Outcome) -> None:
        """A step was attempted."""
        self.schedules.observe(outcome)
        if self.averaging:
            self.averaging.observe(outcome)
        if self.buffers:
            self.buffers.observe(outcome, self._inside_manual_step)

    def enter_step(self, manual: bool) -> None:
        """A training step begins."""
        self._inside_manual_step = manual
        self._listen()
        if self.buffers:
            self.buffers.enter_step()

    def leave_step(self) -> None:
        """The training step is over (in automatic optimization its backward and optimizer step are still to come)."""
        self._inside_manual_step = False

    def note_backward(self) -> None:
        """A backward ran."""
        self.buffers.note_backward()

    def settle(self) -> None:
        """Somebody is about to look: validation, or a checkpoint."""
        if self.buffers:
            self.buffers.settle()

    def detach(self) -> None:
        """The user's objects are as they were."""
        self.settle()
        self.schedules.detach()
        self.averaging.detach()
        self._steps.guards = None
