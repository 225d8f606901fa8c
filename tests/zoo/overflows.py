"""Steps that overflow, and their scaler."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from support import Toy, batches
from torch import Tensor, nn

from lightning_amp import AmpPrecision, DynamicLossScaler


def fp16(scale: float = 64.0, **kwargs: Any) -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(scale, **kwargs))


class BadRow(Toy):
    """The loss of a batch is not finite if a row holds the value `marker`."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * torch.where(batch.abs().max() > 1e3, torch.inf, 1.0)


def with_bad(*indices: int, count: int = 8) -> Any:
    data = torch.cat(list(batches(count)))
    for index in indices:
        data[4 * index] = 1e4
    return torch.utils.data.DataLoader(data, batch_size=4)


class LargeOutput(Toy):
    """Its first layer overflows in fp16, although its inputs do not, and its gradients fit at a low scale only."""

    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)))
        nn.init.constant_(self.net[0].weight, 3e4)

    def loss(self, batch: Tensor) -> Tensor:
        return 100 * super().loss(batch.abs())


class HalfBody(L.LightningModule):
    """Frozen weights, and features, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 1e6 * self.head(self.body(batch)).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)
