"""The one line at the start of a fit: what is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_amp import _messages
from lightning_amp._numbers import exact
from lightning_amp.casting import Choice
from lightning_amp.scaling import DynamicLossScaler

if TYPE_CHECKING:
    from lightning_amp.precision._run import Run


def say(run: Run, scaler: torch.amp.GradScaler | None, why: str, *, scaler_unused: bool) -> None:
    """Say precision, device, scaler, and what is protected, for somebody who glances at a terminal.

    Where nothing is trained only a choice of `"auto"` is worth a line.

    Args:
        run: That begins.
        scaler: In use.
        why: The reason of `"auto"`; empty for a precision that was asked for.
        scaler_unused: Whether a scaler was passed that this precision does not need.

    """
    forward = run.forward
    parts = [_precision_on(forward.training, forward.device_type, why)]
    if not run.fitting:
        if why and forward.evaluation == forward.training:
            _messages.info(f"lightning_amp: {parts[0]}.")
        return
    if scaler is not None:
        parts.append(_scale(scaler, resumed=run.module.trainer.ckpt_path is not None))
    if scaler_unused:
        parts.append("`scaler` is left unused")
    if forward.evaluation != forward.training:
        parts.append(f"evaluation in {forward.evaluation.name}")
    if forward.num_fp32_modules:
        parts.append(f"{_counted(forward.num_fp32_modules, 'module')} in fp32")
    ending = f"non-finite steps are {'skipped' if run.skips else 'taken'}"
    if run.named_buffers and run.skips:
        ending += f", which also puts back {_counted(len(run.named_buffers), 'buffer')}"
    _messages.info(f"lightning_amp: {', '.join(parts)}; {ending}.")


def _precision_on(choice: Choice, device_type: str, why: str) -> str:
    what = f"{choice.name} autocast on {device_type}" if choice.mixed else f"fp32 on {device_type}, no autocast"
    return f"precision 'auto' is {choice.name!r} here ({why}): {what}" if why else what


def _scale(scaler: torch.amp.GradScaler, resumed: bool) -> str:
    kind = type(scaler).__name__
    if not scaler.is_enabled():
        return f"no loss scale ({kind}, disabled)"
    if isinstance(scaler, DynamicLossScaler):
        kind = "static" if scaler.min_scale == scaler.max_scale else "dynamic"
    return f"loss scale {'from the checkpoint' if resumed else exact(scaler.get_scale())} ({kind})"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
