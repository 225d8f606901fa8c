"""Make histories of a `ScaleMonitor` from runs in which chosen steps overflow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_amp import DynamicLossScaler, StepRecord
from lightning_amp.reports import ScaleHistory

REASONS: dict[str, Any] = {".": "none", "O": "gradient", "L": "loss"}


def scale_run(pattern: str, **policy: Any) -> ScaleHistory:
    """Run a torch loop with a scaler. `.` is a clean step, `O` one that overflows, `L` one with a NaN loss."""
    scaler = DynamicLossScaler(**policy)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    records: list[StepRecord] = []
    for index, step in enumerate(pattern):
        scale = scaler.get_scale()
        parameter.grad = None
        scaler.scale(parameter.sum() * (torch.nan if step == "L" else 1.0)).backward()
        if step == "O":
            parameter.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        records.append(StepRecord(index, 0, scale, scaler.get_scale(), step != ".", REASONS[step]))
    history = ScaleHistory()
    history.extend(records)
    return history
