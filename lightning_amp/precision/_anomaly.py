"""`Trainer(detect_anomaly=True)` under loss scaling: an overflow of the scaled backward is not an anomaly."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn
from typing_extensions import final

from lightning_amp.numerics import all_finite


@final
class AnomalyCheck:
    """Lets the scaled backward overflow, then looks whether the true one is finite.

    The scaled backward runs without the check for NaN (the traces are still recorded). If it left non-finite gradients,
    the true loss is differentiated again with the check on: a real anomaly raises torch's own error, with its trace; an
    overflow passes, and the step is skipped as usual.

    Args:
        loss: The true loss, shape [].

    Cost: keeps the graph and reads a flag at each backward; a second backward after an overflow. Anomaly detection is a
    debugging mode anyway.

    """

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss
        self._mode: torch.autograd.set_detect_anomaly | None = None

    def __enter__(self) -> None:
        self._mode = torch.autograd.set_detect_anomaly(True, check_nan=False)
        self._mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._mode is not None
        self._mode.__exit__(kind, value, traceback)  # type: ignore[arg-type]

    def check(self, module: nn.Module) -> None:
        """Raise what torch raises if the true backward makes NaN.

        Raises:
            RuntimeError: Torch's own.

        """
        params = [p for p in module.parameters() if p.requires_grad]
        if all_finite(p.grad for p in params if p.grad is not None):
            return
        if self._loss.requires_grad and params:
            torch.autograd.grad(self._loss, params, allow_unused=True)
