"""What the optimizer steps of one batch do to the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_amp._compat import _torch
from lightning_amp.scaling._gradient_state import Outcome
from lightning_amp.scaling._gradients import constant, host_value, in_host_memory
from lightning_amp.scaling._scaler import DynamicLossScaler, held_by


class Round:
    """The steps of a batch since the scale was last looked at, and when that is due again.

    It is when all optimizers have stepped, or one of them once more, since what made it overflow does so again. Two
    optimizers that step once each are one round. How many steps there are decides, not what became of them, so that a
    device and the host, which knows of overflows at once, do the same.
    """

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []
        self._stepped: set[int] = set()  # optimizers, in this batch
        self._again: set[int] = set()  # those that stepped more than once

    def add(self, outcome: Outcome) -> None:
        """A step was attempted."""
        self._outcomes.append(outcome)
        (self._again if outcome.window.index in self._stepped else self._stepped).add(outcome.window.index)

    def is_over(self, num_optimizers: int) -> bool:
        """Whether the scale is due before another backward."""
        outcomes = self._outcomes
        return len(outcomes) >= num_optimizers > 0 or any(o.window.index in self._again for o in outcomes)

    def take(self) -> list[Outcome]:
        """The steps; another round begins."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def clear(self) -> None:
        """The batch is over."""
        self._outcomes.clear()
        self._stepped.clear()
        self._again.clear()


def move_scale(scaler: torch.amp.GradScaler, attempts: list[Outcome]) -> None:
    """Move it once, for all steps of a batch."""
    if not attempts:
        return
    scale = _torch.scale_tensor(scaler)
    ours = isinstance(scaler, DynamicLossScaler)
    found_inf: Tensor | None = None
    held: Tensor | None = None
    uncertain = [a for a in attempts if a.overflowed is not False]
    if len(uncertain) == 1 and ours:  # the usual case, in as few launches as possible
        found_inf = uncertain[0].flag(scale)
        loss = uncertain[0].loss
        scaler.advance(found_inf, None if loss is None else held_by(loss, found_inf))
        return
    for attempt in uncertain:
        flag = attempt.flag(scale)
        if attempt.loss is not None and ours:
            loss_flag = held_by(attempt.loss, flag).to(torch.float32)
            held = loss_flag if held is None else torch.maximum(held, loss_flag)
            flag = flag * (1 - loss_flag)  # an overflow of another optimizer still counts
        found_inf = flag if found_inf is None else torch.maximum(found_inf, flag)
    if found_inf is None:
        found_inf = constant(0.0, scale.device)
    if ours:
        scaler.advance(found_inf, None if held is None else held * (1 - found_inf))
    else:
        _torch.set_scale_tensor(scaler, scale.clone())  # its update works in place; records keep the old tensor
        _torch.give_found_inf(scaler, found_inf)
        scaler.update()


def lower_scale(scaler: torch.amp.GradScaler, attempts: list[Outcome]) -> bool:
    """Lower it in the middle of a batch, if one of these steps overflowed; else leave all as it is, growth too.

    Somebody else's scaler has no way to do this without waiting for the device, and is asked only where nobody waits:
    `False` elsewhere, so that these steps are still to be counted at the end of the batch.
    """
    scale = _torch.scale_tensor(scaler)
    found_inf = constant(0.0, scale.device)
    for attempt in attempts:
        flag = attempt.flag(scale)
        if attempt.loss is not None:
            flag = flag * (1 - held_by(attempt.loss, flag).to(torch.float32))
        found_inf = torch.maximum(found_inf, flag)
    if isinstance(scaler, DynamicLossScaler):
        scaler.advance(found_inf, 1 - found_inf)
    elif not in_host_memory(found_inf):
        return False
    elif host_value(found_inf):
        _torch.set_scale_tensor(scaler, scale.clone())
        _torch.give_found_inf(scaler, found_inf)
        scaler.update()
    return True
