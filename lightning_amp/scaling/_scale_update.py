"""What the optimizer steps of one batch do to the loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import final

from lightning_amp._compat import _torch
from lightning_amp.scaling._scaler import DynamicLossScaler
from lightning_amp.scaling._step_result import Skip, StepResult, constant, held_by


@final
class BatchSteps:
    """The steps of one batch, and when they move the scale: at its end, and downwards before the batch is over.

    A batch may take many steps: several epochs over a rollout in one `training_step`, or a critic's. It would lose
    every one of them, and end as stuck, if the scale could not fall in between. It is looked at when all optimizers
    have stepped, or one of them once more, since what made it overflow does so again. Two optimizers that step once
    each are one round. How many steps there are decides, not what became of them, so that a device and the host, which
    knows of overflows at once, do the same.

    """

    def __init__(self) -> None:
        self._counted: list[StepResult] = []  # for the end of the batch
        self._handled: list[StepResult] = []  # have lowered it, unless the device knows that they were clean
        self._round: list[StepResult] = []  # since the scale was last looked at
        self._stepped: set[int] = set()  # optimizers, in this batch
        self._again: set[int] = set()  # those that stepped more than once

    def add(self, step: StepResult) -> None:
        """Note a step."""
        self._counted.append(step)
        self._round.append(step)
        (self._again if step.optimizer_idx in self._stepped else self._stepped).add(step.optimizer_idx)

    def round_is_over(self, num_optimizers: int) -> bool:
        """Return whether the scale is due before another backward."""
        steps = self._round
        if not steps:
            return False
        return len(steps) >= num_optimizers > 0 or any(s.optimizer_idx in self._again for s in steps)

    def end_round(self, scaler: torch.amp.GradScaler) -> None:
        """Lower the scale if a step of this round overflowed; leave it, and its growth, alone otherwise."""
        overflowed = [s for s in self._round if s.overflow.known is not False]
        self._round = []
        if not overflowed or lower_scale(scaler, [s for s in overflowed if s.had_gradients]):
            self._counted = [s for s in self._counted if s not in overflowed]
            self._handled += [s for s in overflowed if s.had_gradients and s.overflow.known is None]

    def end(self, scaler: torch.amp.GradScaler) -> bool:
        """Move the scale once, for all steps that have not moved it; returns whether there were any."""
        counted, handled = self._counted, self._handled
        self.clear()
        moving = [s for s in counted if s.had_gradients]
        if moving or not handled or _has_an_update_of_its_own(scaler):
            move_scale(scaler, moving)
        else:  # a clean batch, unless all of them overflowed
            device = _torch.scale_tensor(scaler).device
            _advance(scaler, constant(0.0, device), torch.stack([s.overflow.flag(device) for s in handled]).amin())
        return bool(counted)

    def clear(self) -> None:
        """Forget them."""
        self._counted, self._handled, self._round = [], [], []
        self._stepped, self._again = set(), set()


def move_scale(scaler: torch.amp.GradScaler, steps: Sequence[StepResult]) -> None:
    """Move the scale once, for all steps of a batch."""
    if not steps:
        return
    scale = _torch.scale_tensor(scaler)
    ours = isinstance(scaler, DynamicLossScaler)
    uncertain = [s for s in steps if s.overflow.known is not False]
    if not uncertain and ours:
        scaler.advance(constant(0.0, scale.device))
    elif len(uncertain) == 1 and ours:  # in as few launches as possible
        found_inf = uncertain[0].overflow.flag(scale.device)
        probe = uncertain[0].loss_probe
        scaler.advance(found_inf, None if probe is None else held_by(probe, found_inf))
    elif ours:
        found_inf = _any_overflow(uncertain, scale.device)
        held = [held_by(s.loss_probe, s.overflow.flag(scale.device)) for s in uncertain if s.loss_probe is not None]
        # an overflow of another optimizer still counts
        scaler.advance(found_inf, torch.stack(held).any() * (1 - found_inf) if held else None)
    else:
        flags = [s.overflow.flag(scale.device) for s in uncertain]
        found_inf = torch.stack(flags).amax() if flags else constant(0.0, scale.device)
        _update_foreign(scaler, found_inf)


def lower_scale(scaler: torch.amp.GradScaler, steps: Iterable[StepResult]) -> bool:
    """Lower the scale in the middle of a batch, if gradients of one of these steps overflowed; leave it otherwise.

    A scaler with an `update` of its own cannot do this without waiting for the device, and is asked only where nobody
    waits: `False` elsewhere, so that these steps are still to be counted at the end of the batch.
    """
    found_inf = _any_overflow(steps, _torch.scale_tensor(scaler).device)
    if not _has_an_update_of_its_own(scaler):
        _advance(scaler, found_inf, 1 - found_inf)
        return True
    overflow = Skip.on_device(found_inf).known
    if overflow:
        _update_foreign(scaler, found_inf)
    return overflow is not None


def _any_overflow(steps: Iterable[StepResult], device: torch.device) -> Tensor:
    flags = [s.gradient_overflow(device) for s in steps]
    return torch.stack(flags).amax() if flags else constant(0.0, device)


def _has_an_update_of_its_own(scaler: torch.amp.GradScaler) -> bool:
    return not isinstance(scaler, DynamicLossScaler) and type(scaler).update is not torch.amp.GradScaler.update


def _advance(scaler: torch.amp.GradScaler, found_inf: Tensor, held: Tensor) -> None:
    """Do what the scaler's `update` does, without waiting for the device, and nothing where `held` [] is not 0."""
    if isinstance(scaler, DynamicLossScaler):
        scaler.advance(found_inf, held)
        return
    scale, tracker = _torch.scale_tensor(scaler), _torch.growth_tracker(scaler)
    new_scale, new_tracker = scale.clone(), tracker.clone()
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    _torch.amp_update_scale(new_scale, new_tracker, found_inf, growth, backoff, scaler.get_growth_interval())
    stays = held > 0
    _torch.set_scale_tensor(scaler, torch.where(stays, scale, new_scale), torch.where(stays, tracker, new_tracker))


def _update_foreign(scaler: torch.amp.GradScaler, found_inf: Tensor) -> None:
    # its update works in place; records keep the old tensor
    _torch.set_scale_tensor(scaler, _torch.scale_tensor(scaler).clone())
    _torch.give_found_inf(scaler, found_inf)
    scaler.update()
