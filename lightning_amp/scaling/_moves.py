"""What the optimizer steps of one batch do to the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_amp import _compat
from lightning_amp.scaling._gradients import constant, host_value, in_host_memory
from lightning_amp.scaling._scaler import DynamicLossScaler, held_by
from lightning_amp.scaling._windows import Outcome


def move_scale(scaler: torch.amp.GradScaler, attempts: list[Outcome]) -> None:
    """Move it once, for all steps of a batch."""
    if not attempts:
        return
    scale = _compat.scale_tensor(scaler)
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
        _compat.set_scale_tensor(scaler, scale.clone())  # its update works in place; records keep the old tensor
        _compat.give_found_inf(scaler, found_inf)
        scaler.update()


def lower_scale(scaler: torch.amp.GradScaler, attempts: list[Outcome]) -> None:
    """Lower it in the middle of a batch, if one of these steps overflowed; else leave all as it is, growth too.

    Somebody else's scaler has no way to do this without waiting for the device, and is asked only where nobody waits.
    """
    scale = _compat.scale_tensor(scaler)
    found_inf = constant(0.0, scale.device)
    for attempt in attempts:
        flag = attempt.flag(scale)
        if attempt.loss is not None:
            flag = flag * (1 - held_by(attempt.loss, flag).to(torch.float32))
        found_inf = torch.maximum(found_inf, flag)
    if isinstance(scaler, DynamicLossScaler):
        scaler.advance(found_inf, 1 - found_inf)
    elif in_host_memory(found_inf) and host_value(found_inf):
        _compat.set_scale_tensor(scaler, scale.clone())
        _compat.give_found_inf(scaler, found_inf)
        scaler.update()
