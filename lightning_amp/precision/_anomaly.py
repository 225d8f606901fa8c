"""Detect anomalies under loss scaling, where an overflow of the scaled backward is not an anomaly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp.numerics import all_finite


@final
class AnomalyCheck:
    """Context of the scaled backward, which may overflow; :meth:`check` then tests whether the true backward is finite.

    The scaled backward runs without the check for NaN, and still records traces. If it leaves non-finite gradients, the
    true loss is differentiated again with the check. A real anomaly raises torch's own error, with its trace. After an
    overflow the step is skipped as usual.

    Cost: the graph is kept, each backward reads a flag, and a second backward runs after an overflow.
    """

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss

    def __enter__(self) -> None:
        self._mode = torch.autograd.set_detect_anomaly(True, check_nan=False)
        self._mode.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._mode.__exit__(*exc)

    def check(self, module: nn.Module) -> None:
        """Raise torch's own `RuntimeError` if the true backward makes NaN."""
        params = [p for p in module.parameters() if p.requires_grad]
        if all_finite(p.grad for p in params if p.grad is not None):
            return
        if self._loss.requires_grad and params:
            torch.autograd.grad(self._loss, params, allow_unused=True)
