"""Modules of which a part must stay in fp32, and healthy modules, each as a user would write it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

SIZE = 8


class Rows(L.LightningDataModule):
    """Rows of 8 values, in the same order each time."""

    def __init__(self, num_rows: int = 64) -> None:
        super().__init__()
        self.num_rows = num_rows

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(self.num_rows, SIZE, generator=torch.Generator().manual_seed(0)), batch_size=4)  # pyright: ignore[reportArgumentType]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Case(L.LightningModule):
    """The regression that all of them learn with SGD: the change of a weight is its gradient."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch).float() - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# -- parts that half precision breaks ----------------------------------------------------------------------------------


class LargeScores(nn.Module):
    """Its own code overflows fp16: attention scores that are divided too late."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) * 400) @ (self.key(x) * 400).T
        return x + torch.softmax(scores / 400**2, -1) @ x


class LargeInside(nn.Module):
    """Its layer overflows fp16: the input is scaled up, and the output down again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * 1e6) / 1e6


class Centred(nn.Module):
    """Takes the difference of large numbers, for which bf16 has too few digits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.constant_(self.linear.bias, 300.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x - x.mean(-1, keepdim=True)
        return x / (x.std(-1, keepdim=True) + 1e-5)


class RootMeanSquare(nn.Module):
    """Squares overflow fp16; then all gradients are zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


# -- with a culprit ----------------------------------------------------------------------------------------------------


class Attention(Case):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(SIZE, 16), nn.Linear(16, 1)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), LargeScores(16), nn.Linear(16, 16))
        nn.init.normal_(self.inp.weight, std=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.inp(x)))


class Two(Case):
    """Both must be in fp32; one alone does not help at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = LargeInside(16), LargeInside(16)
        self.inp, self.between, self.head = nn.Linear(SIZE, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.between(self.one(self.inp(x)))))


class InARow(Case):
    """Three of five layers are culprits of different kinds; their names differ only in a number."""

    def __init__(self) -> None:
        super().__init__()
        body = [LargeInside(16), nn.Linear(16, 16), LargeScores(16), nn.Linear(16, 16), LargeInside(16)]
        self.inp, self.body, self.head = nn.Linear(SIZE, 16), nn.Sequential(*body), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.inp(x)))


class Normalised(Case):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.centred, self.head = nn.Linear(SIZE, 16), Centred(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.centred(self.inp(x).relu()))


class LargeActivations(Case):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.body, self.head = (
            nn.Linear(SIZE, 16),
            RootMeanSquare(16),
            nn.Linear(16, 16),
            nn.Linear(16, 1),
        )
        nn.init.constant_(self.inp.bias, 600.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.inp(x))).tanh())


class OnlyValidation(Case):
    """Gradients are right, but a metric is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.check = nn.Linear(SIZE, 16), nn.Linear(16, 1), LargeInside(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.check(self.body(batch))).float().square().mean())


# -- healthy -----------------------------------------------------------------------------------------------------------


class Mlp(Case):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIZE, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Transformer(Case):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.inp, self.body, self.head = nn.Linear(1, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.inp(x[..., None])).mean(1))


class Convolutional(Case):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, None]).flatten(1))


# -- where nothing helps -----------------------------------------------------------------------------------------------


class OutsideOfModules(Case):
    """The overflow is in the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(SIZE, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        z = self.inp(batch) * 300
        return (z @ z.T).float().square().mean() / 1e9


class NotFinite(Case):
    """The loss is NaN in fp32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(SIZE, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.inp(batch).log().mean()
