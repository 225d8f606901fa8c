"""Modules whose validation is wrong in half precision or in every precision, and similar healthy modules.

The targets are the outputs of the module itself in fp32, with some noise. So its loss is small in fp32, and as large as
the error in half precision. `entries(Evaluated, "ill")` and `entries(Evaluated, "healthy")` return all of them.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import lightning as L
import torch
from support.trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

from lightning_amp import AmpPrecision, MetricComparison
from zoo.registry import Entry, add

BATCH_SIZE = 16
Batch = dict[str, Tensor]
Rows = list[Batch]
Middle = Callable[[Any, Tensor, Batch], Tensor]
"""Is called with the module, the hidden features and the batch, and returns features."""


class Case(L.LightningModule):
    """A regression whose targets are its own outputs."""

    def __init__(self, middle: Middle = lambda module, hidden, batch: hidden.tanh(), **parts: nn.Module) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 16)
        self.out = nn.Linear(16, 1)
        self.middle = middle
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, batch: Batch) -> Tensor:
        return self.out(self.middle(self, self.inp(batch["x"]), batch))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch).float(), batch["y"])

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch).float(), batch["y"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@dataclass(frozen=True, kw_only=True)
class Evaluated(Entry):
    """A case with the module that is named and its cure, or with names of values that are not finite."""

    make: Callable[[], Case]
    module: str | None = None
    cure: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    in_fp32_too: bool = False
    tolerance: float | None = None
    names: tuple[str, ...] = ()
    spoil: Callable[[Rows], None] | None = None

    def planted(self) -> tuple[Case, Rows]:
        torch.manual_seed(0)
        module = self.make()
        rows = rows_for(module)
        if self.spoil is not None:
            self.spoil(rows)
        return module, rows


T = TypeVar("T", bound=Callable[..., Any])


def case(name: str, *tags: str, part: str = "", middle: Middle | None = None, **expected: Any) -> Callable[[T], T]:
    """Declare the class below as a case, or as a `part` that `middle` calls. What `expected` says makes it ill."""

    def declare(found: T) -> T:
        make = (lambda: Case(middle, **{part: found()})) if middle else found
        kind = "ill" if expected else "healthy"
        add(Evaluated(name=name, tags=frozenset({kind, *tags}), make=make, **expected))
        return found

    return declare


def in_fp32(*modules: str) -> dict[str, Any]:
    return {"fp32_modules": [*modules]}


def turned(features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    u, v = features.chunk(2, -1)
    return torch.cat([u * cos - v * sin, u * sin + v * cos], -1)


# -- a module is to blame ----------------------------------------------------------------------------------------------


@case(
    "rotary angles", part="rotary", middle=lambda m, hidden, batch: m.rotary(hidden, batch["position"]),
    module="rotary", cure=in_fp32("rotary"),
)  # fmt: skip
@case(
    "angles of rounded positions", part="rotary",
    middle=lambda m, hidden, batch: m.rotary(hidden, batch["position"].to(hidden.dtype)),
    module="rotary", cure={"eval_precision": "fp32"},
)  # fmt: skip
class Rotary(nn.Module):
    """Angles in the precision of the features."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        frequencies = 10.0 ** -torch.arange(8, device=x.device)
        angles = position[:, None].to(x.dtype) * frequencies.to(x.dtype)
        return turned(x, angles.cos(), angles.sin())


class Positions(nn.Module):
    """Indices above 256 that are cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 16)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + self.table(position.to(x.dtype).long())


@case("indices", module="positions", cure=in_fp32("positions"))
class LooksUp(Case):
    def __init__(self) -> None:
        super().__init__(lambda m, hidden, batch: m.positions(hidden, batch["position"]), positions=Positions())


@case("indices, torchmetrics", module="positions", cure=in_fp32("positions"))
class LooksUpWithMetric(LooksUp):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.error(self(batch), batch["y"])
        self.log("val_error", self.error)


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * 3e5


@case("overflow in evaluation", module="loud", cure={"eval_precision": "fp32"}, precision="fp16")
class OverflowsInEvaluation(Case):
    def __init__(self) -> None:
        parts = {"loud": Loud(), "norm": nn.LayerNorm(16), "fc": nn.Linear(16, 16)}
        super().__init__(lambda m, hidden, batch: m.norm(m.fc(m.loud(hidden))), **parts)


@case("log-probabilities", module="head.out", cure=in_fp32("head.out"), tolerance=1e-5)
@case("log-probabilities in fp16", module="head.out", cure=in_fp32("head.out"), precision="fp16", tolerance=1e-5)
class Policy(Case):
    """Compares log-probabilities with the log-probabilities of an old policy, computed in fp32."""

    def __init__(self) -> None:
        super().__init__(head=nn.Sequential(OrderedDict(out=nn.Linear(16, 8), probabilities=nn.LogSoftmax(-1))))
        nn.init.constant_(self.head.out.bias, 100.0)  # which a softmax takes out again, and half precision does not

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.inp(batch["x"])).float()[:, :1]


@case(
    "overflow to minus infinity, which is no mask",
    module="out",
    cure=in_fp32("out"),
    precision="fp16",
    names=("is not finite in fp16, although its inputs are",),
)
class Negative(Case):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.inp.weight, 1.0)
        nn.init.constant_(self.out.weight, -1.0)

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.softplus(-self.out(self.inp(1e3 * batch["x"].abs() + 1e3)))


def attend(module: Any, hidden: Tensor, batch: Batch) -> Tensor:
    return module.attention(hidden, batch["allowed"])


@case("attends", part="attention", middle=attend)
class Attention(nn.Module):
    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        scores = (x @ x.T).masked_fill(~allowed[:, None].expand(-1, len(x)), float("-inf"))
        return scores.softmax(-1) @ x


# -- an operation of the step is ---------------------------------------------------------------------------------------


@case("a constant in the step", cure={"eval_precision": "fp32"}, tolerance=0.01)
class Offset(Case):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        prediction = self(batch) + 1000.0
        self.log("val_loss", nn.functional.mse_loss(prediction.float() - 1000.0, batch["y"]))


# CUDA's autocast computes the norm in fp32
@case("overflow in the step", "cpu", module="inp", cure=in_fp32("inp"), precision="fp16")
class NormInStep(Case):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        features = self.inp(batch["x"]) * 300
        self.log("val_norm", features.pow(2).sum(-1).sqrt().float().mean())


@case("time in the step", module="inp", cure=in_fp32("inp"), tolerance=0.01)
class TimeInStep(Case):
    """Angles that are computed outside of all modules."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        prediction = self(batch)
        angle = (batch["position"].to(self.inp(batch["x"]).dtype) * 1.5)[:, None]
        self.log("val_loss", nn.functional.mse_loss((prediction + angle.sin()).float(), batch["y"] + self.exact(batch)))

    def exact(self, batch: Batch) -> Tensor:
        return (batch["position"] * 1.5)[:, None].sin()


@case(
    "logarithm of 0",
    in_fp32_too=True,
    names=("batches were checked, and are finite", "a quotient or `log` of 0, in the metric or the model"),
)
class LogOfZero(Case):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        share = (self(batch).float() * 0).relu()
        self.log("val_entropy", -(share * torch.log(share)).sum())


# -- weights and batches are ------------------------------------------------------------------------------------


@case("running statistics", in_fp32_too=True, names=("norm.running_var",))
class SpoiltStatistics(Case):
    def __init__(self) -> None:
        super().__init__(lambda m, hidden, batch: m.norm(hidden), norm=nn.BatchNorm1d(16))

    def on_validation_start(self) -> None:
        self.norm.running_var[3] = float("nan")


@case("a weight", in_fp32_too=True, names=("out.weight",))
class SpoiltWeight(Case):
    def on_validation_start(self) -> None:
        self.out.weight.data[0, 5] = float("inf")


def spoil_a_target(rows: Rows) -> None:
    rows[BATCH_SIZE * 2 + 1]["y"][:] = float("nan")


case("NaN targets", in_fp32_too=True, names=("batch['y']",), spoil=spoil_a_target)(Case)


# -- healthy -----------------------------------------------------------------------------------------------------------

case("small")(Case)


@case("deep")
class Deep(Case):
    def __init__(self) -> None:
        body = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.GELU())])
        super().__init__(lambda m, hidden, batch: m.body(hidden), body=body)


@case("normalized", part="body", middle=lambda m, hidden, batch: m.body(hidden))
def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.LayerNorm(16))


@case("recurrent", part="rnn", middle=lambda m, hidden, batch: m.rnn(hidden[:, None].expand(-1, 5, -1))[0][:, -1])
def recurrent() -> nn.Module:
    return nn.LSTM(16, 16, batch_first=True)


@case(
    "transformer", part="encoder", middle=lambda m, hidden, batch: m.encoder(hidden[:, None].expand(-1, 3, -1)).mean(1)
)
def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


@case("classifies")
class Classifies(Deep):
    """Accuracy over few samples, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 4)
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch).float(), (batch["x"][:, 0] > 0).long())

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits, labels = self(batch), (batch["x"][:, 0] > 0).long()
        self.accuracy(logits, labels)
        hits = (logits.argmax(-1) == labels).float()
        self.log_dict({"val_accuracy": self.accuracy, "val_share": hits.mean()})
        self.log("val_hits", hits.sum(), reduce_fx="sum")


@case("samples")
def samples() -> Case:
    """Draws random numbers in fp32, as a VAE should."""
    return Case(lambda m, hidden, batch: hidden.float() + torch.randn_like(hidden, dtype=torch.float32))


@case("well trained")
class WellTrained(Case):
    """Predicts so well that its error is the rounding of the prediction: `noise=0`."""


# -- running one -------------------------------------------------------------------------------------------------------


def rows_for(module: Case, number: int = BATCH_SIZE * 4, seed: int = 0) -> Rows:
    """Inputs, with the outputs of the module in fp32 and some noise as targets."""
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


def validate(module: Case, rows: Rows, precision: str, **kwargs: Any) -> tuple[MetricComparison, list[str]]:
    """Validate once with the callback, and return its warnings."""
    own = {name: kwargs.pop(name) for name in ("by_module", "limit_batches", "tolerance") if name in kwargs}
    comparison = MetricComparison(**own)
    trainer = quiet_trainer(plugins=AmpPrecision(precision, **kwargs), callbacks=[comparison])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(module, DataLoader(rows, batch_size=BATCH_SIZE), verbose=False)
    return comparison, [str(one.message) for one in caught if "MetricComparison" in str(one.message)]
