"""Batches that hold float64, NumPy's default: autocast does not take it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

from lightning_amp._containers import to_fp32

_said = WarningCache()


def obviously_fine(data: Any) -> bool:
    """Return whether a batch is a tensor, or a plain list or tuple of tensors, without float64: no need to search."""
    if type(data) is Tensor:
        return data.dtype != torch.float64
    items = data if type(data) in (list, tuple) else (data,)
    return all(isinstance(item, Tensor) and item.dtype != torch.float64 for item in items)


def downcast(data: Any, module: LightningModule) -> Any:
    """Return the batch with float64 tensors as float32, said once; as it is if the module computes in float64.

    Autocast leaves float64 tensors alone, so a linear layer would meet a float64 input and a half-precision weight.
    """
    converted = to_fp32(data, (torch.float64,))
    if converted is data or any(p.dtype == torch.float64 for p in module.parameters()):
        return data
    _said.info(
        "lightning_amp: batches hold float64 tensors, which autocast does not take; they are cast to float32. Make the"
        " dataset return float32 (numpy's default is float64) to save the copy."
    )
    return converted
