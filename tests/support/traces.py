"""Run a backward under a trace."""

from __future__ import annotations

from torch import Tensor

from lightning_amp.tracing import Trace


def backward(trace: Trace, loss: Tensor) -> None:
    with trace.in_backward():
        loss.backward()
