"""A round of optimizer steps: when it is over, and how it moves the scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from typing_extensions import final

from lightning_amp.numerics import nonfinite
from lightning_amp.scaling._log import StepResult
from lightning_amp.scaling._scalars import constant
from lightning_amp.scaling._scaler import DynamicLossScaler


@final
class Round:
    """The steps since the scale has moved.

    In a Trainer the round ends with the batch. In a loop of the user's own it ends when all optimizers have stepped, or
    one of them steps again. A batch may take many steps, such as several epochs over a rollout in one `training_step`.
    If the scale could not fall in between, one overflow would repeat in every step. So within a batch the scale falls
    by the same rule, and the batch still counts once for growth. Rounds count steps, not overflows, so the result does
    not depend on whether the host has read the flags.
    """

    def __init__(self) -> None:
        self._steps: list[StepResult] = []
        self._lowered: list[StepResult] = []  # steps of this batch that have lowered the scale, if they overflowed
        self.counts: Counter[int] = Counter()
        """How often each optimizer has stepped in this batch, by its index."""

    def add(self, step: StepResult) -> None:
        """Add a step."""
        self._steps.append(step)
        self.counts[step.optimizer_idx] += 1

    def is_over(self, num_optimizers: int) -> bool:
        """Return whether all optimizers have stepped, or one of them more than once."""
        again = any(self.counts[step.optimizer_idx] > 1 for step in self._steps)
        return again or len(self._steps) >= num_optimizers > 0

    def lower(self, scaler: DynamicLossScaler) -> None:
        """Let the scale fall, if gradients of these steps overflowed, before the next backward of the batch."""
        steps, self._steps = self._steps, []
        self._lowered += steps
        _move(scaler, steps, grows=False)

    def move(self, scaler: DynamicLossScaler) -> None:
        """Move the scale once, for all steps that have not moved it."""
        if self._steps:
            _move(scaler, self._steps, grows=True)
        elif self._lowered:  # the batch counts as clean unless all of its steps overflowed
            device = scaler.scale_tensor.device
            flags = [step.overflow.flag(device) for step in self._lowered]
            scaler.advance(constant(0.0, device), torch.stack(flags).amin())


def _move(scaler: DynamicLossScaler, steps: Sequence[StepResult], *, grows: bool) -> None:
    device = scaler.scale_tensor.device
    uncertain = [step for step in steps if step.overflow.known is not False]
    if not uncertain:
        if grows:
            scaler.advance(constant(0.0, device))
        return
    flags = [step.overflow.flag(device) for step in uncertain]
    losses = [
        None if step.loss_probe is None else nonfinite(step.loss_probe).to(device).logical_and(flag)
        for step, flag in zip(uncertain, flags, strict=True)
    ]
    if len(uncertain) == 1:  # in as few launches as possible
        found_inf, held = flags[0], losses[0]
    else:  # an overflow under a finite loss counts, whatever the losses of other steps were
        bad = torch.stack([constant(0.0, device) if each is None else each.float() for each in losses])
        found_inf = (torch.stack(flags) - bad).amax()
        held = bad.amax() * (1 - found_inf)
    if not grows:
        held = 1 - found_inf if held is None else torch.maximum(1 - found_inf, held.float())
    scaler.advance(found_inf, held)
