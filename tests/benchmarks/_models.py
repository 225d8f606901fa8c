"""The models that the benchmarks time, in the sizes that the speed targets name."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class Timed(L.LightningModule):
    def __init__(self, net: nn.Module, optimizer: Any = torch.optim.AdamW, **settings: Any) -> None:
        super().__init__()
        self.net, self.optimizer, self.settings = net, optimizer, {"lr": 1e-4, **settings}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.settings)


def mlp() -> nn.Module:
    """A tiny MLP, so that the framework's own time dominates."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


class GPT(nn.Module):
    """10.7 million parameters: six layers, width 384, six heads; takes embedded tokens [batch, 64, 384]."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return self.layers(x, mask, is_causal=True)


class UnrolledLSTM(nn.Module):
    """An LSTM cell called 32 times: one weight, used again and again in a step."""

    def __init__(self, width: int = 256, steps: int = 32) -> None:
        super().__init__()
        self.cell, self.steps, self.width = nn.LSTMCell(width, width), steps, width

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], self.width)
        for t in range(self.steps):
            h, c = self.cell(x[:, t], (h, c))
        return h


class ManyNorms(nn.Module):
    """A net of 100 BatchNorm layers, with some 600 buffers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(*(m for _ in range(100) for m in (nn.Linear(width, width), nn.BatchNorm1d(width))))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)
