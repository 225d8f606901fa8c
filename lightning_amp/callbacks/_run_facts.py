"""Facts about the run for a report: how its loss scale moves, and how large its weights are."""

from __future__ import annotations

from typing import Literal

import torch
from lightning.pytorch import LightningModule

from lightning_amp.findings import StepRecord
from lightning_amp.numerics import largest_finite, stack_scalars


def scale_is(scaler: torch.amp.GradScaler | None, record: StepRecord) -> Literal["", "dynamic", "static", "lowest"]:
    """Say how the loss scale of a step moves; empty without one."""
    if scaler is None or record.precision != "fp16":
        return ""
    lowest = getattr(scaler, "min_scale", 0.0)
    if scaler.get_backoff_factor() >= 1 or lowest == getattr(scaler, "max_scale", None):
        return "static"
    return "lowest" if record.scale <= lowest else "dynamic"


def largest_weight(module: LightningModule) -> float:
    """Return the largest magnitude of its parameters. Waits for the device."""
    found = [largest_finite(p.detach()) for p in module.parameters() if p.numel() and p.is_floating_point()]
    return float(stack_scalars(found).max()) if found else 0.0
