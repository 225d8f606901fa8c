"""Detect anomalies under loss scaling, where an overflow of the scaled backward is not an anomaly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_amp.numerics import all_finite


def run_checked(run: Callable[..., None], loss: Tensor, module: nn.Module) -> None:
    """Run the backward of a scaled loss, which may overflow, and then check whether the true backward is finite.

    The scaled backward runs without the check for NaN, and still records traces. If it leaves non-finite gradients, the
    true `loss` is differentiated again with the check. A real anomaly raises torch's own `RuntimeError`, with its
    trace. After an overflow the step is skipped as usual.

    Cost: the graph is kept, each backward reads a flag, and a second backward runs after an overflow.
    """
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        run(retain_graph=True)
    params = [p for p in module.parameters() if p.requires_grad]
    if not all_finite(p.grad for p in params if p.grad is not None) and loss.requires_grad:
        torch.autograd.grad(loss, params, allow_unused=True)
