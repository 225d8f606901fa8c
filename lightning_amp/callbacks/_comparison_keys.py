"""What `MetricComparison` logs, by which names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer

from lightning_amp.reports import ComparisonRow

FP32_PREFIX = "amp/fp32/"
DIFF_PREFIX = "amp/diff/"
ABS_DIFF_PREFIX = "amp/abs_diff/"

AXES = {"step", "epoch"}
"""Lightning takes these two, when a user logs them, for the axes of the plots."""


def as_metrics(trainer: Trainer, rows: Iterable[ComparisonRow]) -> dict[str, torch.Tensor]:
    """Return three values for each row, as `trainer.callback_metrics` holds them."""
    metrics: dict[str, float] = {}
    for row in rows:
        metrics[FP32_PREFIX + row.metric] = row.fp32
        metrics[DIFF_PREFIX + row.metric] = row.diff
        metrics[ABS_DIFF_PREFIX + row.metric] = abs(row.diff)
    device = trainer.strategy.root_device
    # float64 does not exist on all devices
    return {key: torch.tensor(value, dtype=torch.float32, device=device) for key, value in metrics.items()}
