"""Modules whose validation is wrong in half precision, or in every precision, and healthy ones beside them.

The targets are what the module itself gives in fp32, with some noise: so its loss is small in fp32, and as large as
the error in half precision.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from support.trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

from lightning_amp import AmpPrecision, MetricComparison

BATCH_SIZE = 16
Rows = list[dict[str, Tensor]]


class Case(L.LightningModule):
    """Regression of what it gives itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 16)
        self.out = nn.Linear(16, 1)

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return hidden.tanh()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.out(self.middle(self.inp(batch["x"]), batch))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch).float(), batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch).float(), batch["y"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Rotary(nn.Module):
    """Angles in the precision of the features."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        frequencies = 10.0 ** -torch.arange(8, device=x.device)
        angles = position[:, None].to(x.dtype) * frequencies.to(x.dtype)
        u, v = x.chunk(2, -1)
        return torch.cat([u * angles.cos() - v * angles.sin(), u * angles.sin() + v * angles.cos()], -1)


class Rotates(Case):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.rotary(hidden, batch["position"])


class RotatesRounded(Rotates):
    """Who calls it rounds the positions."""

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.rotary(hidden, batch["position"].to(hidden.dtype))


class Frequencies(nn.Module):
    """A product of positions and frequencies, which autocast puts into half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10.0 ** -torch.arange(8.0))

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        angles = position.float()[:, None] @ self.frequencies[None].float()
        return angles.cos(), angles.sin()


class RotatesByProduct(Case):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Frequencies()

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        cos, sin = self.rope(batch["position"])
        u, v = hidden.chunk(2, -1)
        return torch.cat([u * cos - v * sin, u * sin + v * cos], -1)


class TimeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(8, device=x.device) / 8).to(x.dtype)
        angles = t.to(x.dtype)[:, None] * frequencies
        return self.fc(torch.cat([angles.sin(), angles.cos()], -1))


class Diffusion(Case):
    def __init__(self) -> None:
        super().__init__()
        self.time = TimeEmbedding()

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return hidden + self.time(hidden, batch["position"])


class Positions(nn.Module):
    """Indices above 256 that go through bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 16)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + self.table(position.to(x.dtype).long())


class LooksUp(Case):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.positions(hidden, batch["position"])


class LooksUpWithMetric(LooksUp):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.error(self(batch), batch["y"])
        self.log("val_error", self.error)


class RunningSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total, sums = torch.zeros_like(x[:, 0]), []
        for column in range(x.shape[1]):
            total = total + x[:, column]
            sums.append(total)
        return torch.stack(sums, 1)


class Accumulates(Case):
    def __init__(self) -> None:
        super().__init__()
        self.sums = RunningSum()

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        sums = self.sums(hidden.repeat(1, 20).abs() + 1)
        return (sums[:, 1:17] - sums[:, :16]) + (sums[:, -16:] - sums[:, -17:-1])


class Kelvin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 300.0


class Temperatures(Case):
    """A large constant in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.kelvin = Kelvin()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.kelvin(super().forward(batch))


class Offset(Case):
    """A large constant in the step."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        prediction = self(batch) + 1000.0
        self.log("val_loss", nn.functional.mse_loss(prediction.float() - 1000.0, batch["y"]))


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * 3e5


class OverflowsInEvaluation(Case):
    def __init__(self) -> None:
        super().__init__()
        self.loud, self.norm = Loud(), nn.LayerNorm(16)
        self.fc = nn.Linear(16, 16)

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.norm(self.fc(self.loud(hidden)))


class NormInStep(Case):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        features = self.inp(batch["x"]) * 300
        self.log("val_norm", features.pow(2).sum(-1).sqrt().float().mean())


class TimeInStep(Case):
    """Angles that no module has a part in."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        prediction = self(batch)
        angle = (batch["position"].to(self.inp(batch["x"]).dtype) * 1.5)[:, None]
        self.log("val_loss", nn.functional.mse_loss((prediction + angle.sin()).float(), batch["y"] + self.exact(batch)))

    def exact(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["position"] * 1.5)[:, None].sin()


class Counts(Case):
    """Counts rows in bfloat16, which ends at 256."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("total", torch.zeros(()))

    def on_validation_epoch_start(self) -> None:
        self.count.zero_()
        self.total.zero_()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.total += (self(batch).float() - batch["y"]).square().sum()
        for _ in range(len(batch["y"]) * 8):
            self.count += 1

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", 1000 * self.total / self.count.float())


class SpoiltStatistics(Case):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def on_validation_start(self) -> None:
        self.norm.running_var[3] = float("nan")

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.norm(hidden)


class SpoiltWeight(Case):
    def on_validation_start(self) -> None:
        self.out.weight.data[0, 5] = float("inf")


class Attention(nn.Module):
    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        scores = (x @ x.T).masked_fill(~allowed[:, None].expand(-1, len(x)), float("-inf"))
        return scores.softmax(-1) @ x


class Attends(Case):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.attention(hidden, batch["allowed"])


class LogOfZero(Case):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        share = (self(batch).float() * 0).relu()
        self.log("val_entropy", -(share * torch.log(share)).sum())


class Deep(Case):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.GELU())])

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.body(hidden)


class Normalized(Case):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.LayerNorm(16))

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.body(hidden)


class Recurrent(Case):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 16, batch_first=True)

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.rnn(hidden[:, None].expand(-1, 5, -1))[0][:, -1]


class Transformer(Case):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.encoder(hidden[:, None].expand(-1, 3, -1)).mean(1)


class Classifies(Deep):
    """Accuracy over few samples, and counts."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch).float(), (batch["x"][:, 0] > 0).long())

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 4)
        self.accuracy = MulticlassAccuracy(4)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        logits, labels = self(batch), (batch["x"][:, 0] > 0).long()
        self.accuracy(logits, labels)
        hits = (logits.argmax(-1) == labels).float()
        self.log_dict({"val_accuracy": self.accuracy, "val_share": hits.mean()})
        self.log("val_hits", hits.sum(), reduce_fx="sum")


class Samples(Case):
    """Draws in fp32, as a VAE should."""

    def middle(self, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return hidden.float() + torch.randn_like(hidden, dtype=torch.float32)


class WellTrained(Case):
    """Predicts so well that its error is the rounding of the prediction: `noise=0`."""


@dataclass(frozen=True)
class Fault:
    """A case, what is to be found, and what cures it."""

    make: Callable[[], Case]
    cause: str
    module: str | None = None
    cure: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    operation: str = ""
    in_fp32_too: bool = False
    batch_idx: int | None = 0
    names: tuple[str, ...] = ()
    spoil: Callable[[Rows], None] | None = None


def _nan_target(rows: Rows) -> None:
    rows[BATCH_SIZE * 2 + 1]["y"][:] = float("nan")


def _nan_input(rows: Rows) -> None:
    rows[BATCH_SIZE + 1]["x"][1:3] = float("inf")


def _masked(rows: Rows) -> None:
    rows[BATCH_SIZE * 3 + 1]["allowed"].fill_(False)


FAULTS = {
    "rotary angles": Fault(Rotates, "module", "rotary", {"fp32_modules": ["rotary"]}),
    "angles of rounded positions": Fault(RotatesRounded, "module", "rotary", {"fp32_modules": ["rotary", "inp"]}),
    "angles by a product": Fault(RotatesByProduct, "module", "rope", {"fp32_modules": ["rope"]}),
    "time steps": Fault(Diffusion, "module", "time", {"fp32_modules": ["time"]}),
    "indices": Fault(LooksUp, "module", "positions.table", {"fp32_modules": ["positions"]}, operation="embedding"),
    "indices, torchmetrics": Fault(LooksUpWithMetric, "module", "positions.table", {"fp32_modules": ["positions"]}),
    "running sums": Fault(Accumulates, "module", "sums", {"fp32_modules": ["sums"]}),
    "a constant in a module": Fault(Temperatures, "module", "kelvin", {"fp32_modules": ["kelvin"]}, operation="add"),
    "a constant in the step": Fault(Offset, "operation", None, {"fp32_modules": ["out"]}, operation="add"),
    "overflow in evaluation": Fault(
        OverflowsInEvaluation, "module", "loud", {"fp32_modules": ["loud", "fc"]}, "fp16", "mul"
    ),
    "overflow in the step": Fault(NormInStep, "operation", None, {"fp32_modules": ["inp"]}, "fp16", "pow"),
    "time in the step": Fault(TimeInStep, "operation", None, {"eval_precision": "fp32"}, operation="sin"),
    "a counter": Fault(Counts, "state", batch_idx=None, names=("count",)),
    "running statistics": Fault(SpoiltStatistics, "weights", "norm", in_fp32_too=True, names=("norm.running_var",)),
    "a weight": Fault(SpoiltWeight, "weights", "out", in_fp32_too=True, names=("out.weight",)),
    "NaN targets": Fault(Case, "batch", in_fp32_too=True, batch_idx=2, names=("1 in `batch['y']`",), spoil=_nan_target),
    "infinite inputs": Fault(
        Deep, "batch", "inp", in_fp32_too=True, batch_idx=1, names=("2 in `batch['x']`",), spoil=_nan_input
    ),
    "a masked row": Fault(
        Attends, "module", "attention", operation="softmax", in_fp32_too=True, batch_idx=3, spoil=_masked
    ),
    "logarithm of 0": Fault(LogOfZero, "operation", operation="log", in_fp32_too=True),
}

HEALTHY: dict[str, Callable[[], Case]] = {
    "small": Case, "deep": Deep, "normalized": Normalized, "recurrent": Recurrent, "transformer": Transformer,
    "classifies": Classifies, "samples": Samples, "attends": Attends, "well trained": WellTrained,
}  # fmt: skip


def rows_for(module: Case, number: int = BATCH_SIZE * 4, seed: int = 0) -> Rows:
    """Inputs, and as targets what the module gives in fp32, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    module = module.eval()
    x = torch.randn(number, 4, generator=generator)
    batch = {
        "x": x,
        "position": (torch.randint(300, 1900, (number,), generator=generator)).float(),
        "allowed": torch.ones(number, dtype=torch.bool),
    }
    noise = 0.0 if isinstance(module, WellTrained) else 0.05
    with torch.no_grad():
        y = module(batch)[:, :1] + noise * torch.randn(number, 1, generator=generator)
    module.train()
    return [{"y": y[i].clone()} | {name: values[i].clone() for name, values in batch.items()} for i in range(number)]


def validate(
    module: Case, rows: Rows | Sequence[Rows], precision: str, **kwargs: Any
) -> tuple[MetricComparison, list[str]]:
    """Validate once, with the callback, and return what it warns of."""
    several = bool(rows) and isinstance(rows[0], list)
    loaders = [DataLoader(part, batch_size=BATCH_SIZE) for part in (rows if several else [rows])]
    own = {name: kwargs.pop(name) for name in ("by_module", "limit_batches") if name in kwargs}
    comparison = MetricComparison(**own)
    trainer = quiet_trainer(plugins=AmpPrecision(precision, **kwargs), callbacks=[comparison])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(module, loaders, verbose=False)
    return comparison, [str(one.message) for one in caught if "MetricComparison" in str(one.message)]
