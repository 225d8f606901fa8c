"""A backward whose operations a `TorchFunctionMode` sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def watched_backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Do what `loss.backward(...)` does, so that a `TorchFunctionMode` sees the operations inside.

    A mode handles each public function as one call, and is off during that call. So it would see neither a user's own
    Function nor the operations that activation checkpointing runs again. Remove when a mode stays on in a backward.
    """
    from torch.autograd.graph import _engine_run_backward

    if gradient is None and loss.numel() != 1:
        loss.backward(None, retain_graph, create_graph, inputs)  # this call raises the usual error
        return
    gradient = torch.ones_like(loss) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    leaves = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    _engine_run_backward(
        (loss,), (gradient,), keep, create_graph, leaves, allow_unreachable=True, accumulate_grad=True
    )  # fmt: skip
