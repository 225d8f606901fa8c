"""Projects for `doctor`: each is slow or large for one known reason and has a cure; others are healthy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from zoo.registry import Entry, add, entries

Make = Callable[[], L.LightningModule]

SIZES = {"divisor": 1}
"""Tests divide large sizes by this number, because they check findings and not times."""


def sized(number: int) -> int:
    """Divide a size unless it is small."""
    return number if number < 512 else number // SIZES["divisor"]


class Project(L.LightningModule):
    """A classifier with any `net`."""

    def __init__(self, net: nn.Module, optimizer: str = "AdamW", **settings: Any) -> None:
        super().__init__()
        self.net = net
        self.optimizer, self.settings = optimizer, {"lr": 1e-3, "fused": True, **settings}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), **self.settings)


class Rows(L.LightningDataModule):
    """A data module whose batches exist already, so that loading takes no time."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], number: int = 8) -> None:
        super().__init__()
        self.make, self.number = make, number

    def train_dataloader(self) -> Any:
        torch.manual_seed(0)
        return There([self.make() for _ in range(self.number)])


class There:
    """A loader of given batches. Lightning would take a list for several loaders."""

    def __init__(self, batches: list[tuple[Tensor, ...]]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loaded(L.LightningDataModule):
    """A data module with a `DataLoader`."""

    def __init__(self, dataset: Dataset[Any], **settings: Any) -> None:
        super().__init__()
        self.dataset, self.settings = dataset, settings

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, **self.settings)


@dataclass(frozen=True, kw_only=True)
class SlowProject(Entry):
    """A project.

    Attributes:
        code: The expected finding; empty for a healthy project.
        cured: The arguments of `doctor` that the cure changes.
        kwargs: Arguments of the Trainer.

    """

    code: str
    make: Make
    data: Callable[[], L.LightningDataModule]
    cured: Mapping[str, Any] = field(default_factory=dict)
    precision: Any = "bf16"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    memory_gib: float = 0.0

    def arguments(self, *, cured: bool = False) -> dict[str, Any]:
        """Return what `doctor` takes."""
        found = {
            "make_module": self.make,
            "make_data": self.data,
            "precision": self.precision,
            "trainer_kwargs": {"accelerator": "cpu", **self.kwargs},
        }
        return {**found, **self.cured} if cured else found


def rows(*shape: int, classes: int = 10) -> Callable[[], Rows]:
    def make() -> tuple[Tensor, ...]:
        own = [sized(number) for number in shape]
        return torch.randn(*own), torch.randint(0, classes, own[:1])

    return lambda: Rows(make)


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], Rows]:
    def make() -> tuple[Tensor, ...]:
        text = torch.randint(0, sized(vocabulary), (batch, length + 1))
        return text[:, :-1], text[:, 1:]

    return lambda: Rows(make)


def mlp(width: int = 1024, depth: int = 3, inputs: int = 512, outputs: int = 10) -> nn.Sequential:
    width, inputs, outputs = sized(width), sized(inputs), sized(outputs)
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.GELU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def slow(
    name: str,
    code: str,
    make: Make,
    data: Callable[[], L.LightningDataModule],
    cure: Make | None = None,
    *,
    cured: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Declare a slow project, with the cured module or other changed arguments of `doctor`."""
    cured = cured or ({} if cure is None else {"make_module": cure})
    tags = frozenset({"slow" if code else "healthy"})
    add(SlowProject(name=name, tags=tags, code=code, make=make, data=data, cured=cured, **settings))


def healthy(name: str, make: Make, data: Callable[[], L.LightningDataModule], **kwargs: Any) -> None:
    slow(name, "", make, data, **kwargs)


# -- slow ones ---------------------------------------------------------------------------------------------------------


class SlowItems(Dataset[Any]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        time.sleep(1e-3)
        return torch.ones(sized(512)), index % 10


class Casting(nn.Module):
    """Casts to float32 and back around every layer."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        width = sized(512)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 10)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
            for _ in range(6 if self.casts else 0):
                x = x.float()
                x = x.to(torch.bfloat16)
        return self.head(x)


class AutocastOff(nn.Module):
    def __init__(self, off: bool) -> None:
        super().__init__()
        self.net, self.off = mlp(), off

    def forward(self, x: Tensor) -> Tensor:
        if not self.off:
            return self.net(x)
        with torch.autocast("cpu", enabled=False):
            return self.net(x.float())


class InDouble(nn.Module):
    def __init__(self, double: bool) -> None:
        super().__init__()
        self.net, self.double_ = mlp(), double
        self.basis = nn.Buffer(
            torch.randn(sized(512), sized(512), dtype=torch.float64 if double else torch.float32) / 16
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x.to(self.basis.dtype) @ self.basis).float())


class Language(Project):
    """A small language model that computes its loss on all rows at once, or in chunks of rows."""

    def __init__(self, vocabulary: int, width: int = 64, chunks: int = 1) -> None:
        vocabulary = sized(vocabulary)
        super().__init__(nn.Embedding(vocabulary, width), "SGD")
        block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.block = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head, self.chunks = nn.Linear(width, vocabulary, bias=False), chunks

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.block(self.net(x)).flatten(0, 1)
        if self.chunks == 1:
            return F.cross_entropy(self.head(h), y.flatten())
        pairs = zip(h.chunk(self.chunks), y.flatten().chunk(self.chunks), strict=True)
        losses = [checkpoint(self.chunk_loss, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(losses).sum() / y.numel()

    def chunk_loss(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h), y, reduction="sum")


class Waiting(Project):
    """Reads its loss in each step."""

    def __init__(self, how: str) -> None:
        super().__init__(mlp())
        self.how, self.seen = how, []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        if self.how == "mask":
            return F.cross_entropy(out[y > 0], y[y > 0])
        loss = F.cross_entropy(out, y)
        self.seen.append(loss.item() if self.how == "item" else loss.detach())
        return loss


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 256) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(block, 2, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def depthwise() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        own = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs)
        return [own, nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), *block(64, 64), *block(64, 64), *block(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


slow(
    "a slow data set", "data-bound", lambda: Project(mlp()), lambda: Loaded(SlowItems(), batch_size=32),
    cured={"make_data": lambda: Loaded(SlowItems(), batch_size=32, num_workers=16, persistent_workers=True)},
)  # fmt: skip
slow(
    "a tiny perceptron", "model-too-small", lambda: Project(mlp(16, 3, 8)), rows(4, 8), cured={"precision": "fp32"}
)  # fmt: skip
slow(
    "casts back and forth", "many-casts", lambda: Project(Casting(True)), rows(2048, 512),
    lambda: Project(Casting(False)),
)  # fmt: skip
slow(
    "autocast turned off", "autocast-off", lambda: Project(AutocastOff(True)), rows(256, 512),
    lambda: Project(AutocastOff(False)),
)  # fmt: skip
slow(
    "attention with dropout", "autocast-off", lambda: Project(Transformer(0.1)), rows(4, 256, 256),
    lambda: Project(Transformer()),
)  # fmt: skip
slow(
    "a buffer in float64", "autocast-off", lambda: Project(InDouble(True)), rows(256, 512),
    lambda: Project(InDouble(False)),
)  # fmt: skip
slow(
    "most modules in fp32", "fp32-modules-dominate", lambda: Project(mlp()), rows(512, 512),
    cured={"precision": "bf16"}, precision={"precision": "bf16", "fp32_modules": ["net.0", "net.2"]},
)  # fmt: skip
slow(
    "AdamW that is not fused", "optimizer-not-fused", lambda: Project(mlp(1024, 8), fused=False), rows(16, 512),
    lambda: Project(mlp(1024, 8)),
)  # fmt: skip
slow(
    "a large vocabulary", "large-logits", lambda: Language(32_000), tokens(4, 128, 32_000),
    lambda: Language(32_000, chunks=8),
)  # fmt: skip
slow("a loss that the host reads", "host-waits", lambda: Waiting("item"), rows(256, 512), lambda: Waiting("keep"))
slow("a mask that selects rows", "host-waits", lambda: Waiting("mask"), rows(256, 512), lambda: Waiting("keep"))
slow(
    "Adam and a batch of one row, on a device that it fills", "state-dominates",
    lambda: Project(mlp(2048, 4), "Adam"), rows(1, 512), memory_gib=0.5,
    cured={"make_module": lambda: Project(mlp(256, 4), "SGD"), "make_data": rows(4096, 512)},
)  # fmt: skip
slow(
    "fp16 on a CPU", "emulated-precision", lambda: Project(mlp()), rows(64, 512), cured={"precision": "bf16"},
    precision="fp16",
)  # fmt: skip
slow(
    "depthwise convolutions, channels first", "channels-last", lambda: Project(depthwise()), rows(16, 3, 32, 32),
    lambda: Project(last(depthwise())), precision="fp32",
)  # fmt: skip
slow(
    "layers with odd widths", "sizes-not-aligned", lambda: Project(mlp(333, 6, 333)), rows(333, 333),
    cured={"make_module": lambda: Project(mlp(336, 6, 336)), "make_data": rows(336, 336)},
)  # fmt: skip


# -- healthy ones ------------------------------------------------------------------------------------------------------


class Contrastive(Project):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (F.normalize(self.net(x + 0.1 * torch.randn_like(x)).float(), dim=1) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a), device=a.device))


class Adversarial(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(1024, 3, 512, 512), mlp(1024, 3, 512, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()  # type: ignore[misc]
        fake = self.generator(torch.randn_like(x))
        self.step(first, F.softplus(-self.critic(fake)).mean())
        loss = F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(x)).mean()
        self.step(second, loss)

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(m.parameters(), fused=True) for m in (self.generator, self.critic)]


class LongShort(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(sized(256), sized(512), batch_first=True), nn.Linear(sized(512), 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(128, 128, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


healthy("a perceptron", lambda: Project(mlp()), rows(512, 512))
healthy("a transformer", lambda: Project(Transformer()), rows(16, 64, 256))
healthy("a contrastive learner", lambda: Contrastive(mlp(1024, 3, 512, 128)), rows(512, 512))
healthy("two adversarial networks", Adversarial, rows(512, 512))
healthy("an LSTM", lambda: Project(LongShort()), rows(64, 16, 256))
healthy("convolutions, channels last", lambda: Project(last(convolutions())), rows(32, 3, 32, 32))
healthy("a language model with a small vocabulary", lambda: Language(512, 256), tokens(8, 64, 512))
healthy("gradient accumulation", lambda: Project(mlp()), rows(512, 512), kwargs={"accumulate_grad_batches": 4})

SLOW, HEALTHY = entries(SlowProject, "slow"), entries(SlowProject, "healthy")
