"""Count how often the host waits for the device in an optimizer step, over a grid of training loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import lightning as L
import pretended
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from typing_extensions import final
from zoo.toy import FEATURES, Toy, batches

from benchmarks.headline._waits import SyncWarnings
from lightning_amp import (
    AmpPrecision,
    DynamicLossScaler,
    GradientMonitor,
    MetricComparison,
    OverflowLocator,
    ScaleMonitor,
)
from support.callbacks import Poison
from support.plugins import stock
from support.trainers import fit

Loop = Literal["automatic", "manual", "two optimizers"]
Clip = Literal["none", "norm", "value"]
Precision = Literal["fp32", "bf16", "fp16"]

ACCELERATOR = pretended.KIND or "cuda"

WARM_UP, CLEAN, SKIPPED = range(3), range(3, 6), range(6, 9)
"""Batches that are not counted, that step, and that skip the step."""


@final
class Lamb(torch.optim.Optimizer):
    """An optimizer that torch does not have, with one loop over the parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = torch.where(p.norm() > 0, p.norm() / p.grad.norm().clamp(min=1e-6), 1.0)
                    p.sub_(group["lr"] * trust * p.grad)
        return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda params, **kwargs: torch.optim.SGD(params, momentum=0.9, **kwargs),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "Lamb": Lamb,
}
FUSED = ["SGD", "SGD with momentum", "Adam", "AdamW", "Adagrad"]
VARIANTS = [*((name, True) for name in FUSED), *((name, False) for name in OPTIMIZERS)]
"""Name of an optimizer, and whether it is fused."""

CALLBACKS: dict[str, Callable[[], list[L.Callback]]] = {
    "none": list,
    "ScaleMonitor": lambda: [ScaleMonitor(log_every_n_steps=1000)],
    "OverflowLocator": lambda: [OverflowLocator()],
    "GradientMonitor": lambda: [GradientMonitor(10**9)],
    "MetricComparison": lambda: [MetricComparison()],
}


class Found(NamedTuple):
    """Waits per optimizer step; `None` if nothing was promised, or measured."""

    clean: float | None
    skipped: float | None

    def __str__(self) -> str:
        return " ".join("  -" if value is None else f"{value:3g}" for value in self)


class Case(NamedTuple):
    """One training loop."""

    optimizer: str
    fused: bool
    loop: Loop
    clip: Clip
    precision: Precision
    callback: str = "none"

    @property
    def expected(self) -> Found:
        """Return the waits that docs/guide/training.md and the docstrings of the callbacks promise."""
        waits = 0.0 if self.fused else 1.0
        if self.callback == "OverflowLocator":  # reads the flags of a batch, and repeats a skipped step
            return Found(1.0 / self.num_optimizers if self.fused else waits, None)
        return Found(waits, waits)

    @property
    def num_optimizers(self) -> int:
        return 2 if self.loop == "two optimizers" else 1

    def plugin(self) -> AmpPrecision:
        scaler = DynamicLossScaler(1024.0) if self.precision == "fp16" else None
        return AmpPrecision(self.precision, scaler=scaler)

    def stock_plugin(self) -> Any:
        """Return Lightning's own plugin."""
        return None if self.precision == "fp32" else stock(self.precision)

    def module(self) -> L.LightningModule:
        make = OPTIMIZERS[self.optimizer]
        kwargs = {"fused": True} if self.fused else {}
        return Looped(lambda params: make(params, lr=0.01, **kwargs), self.loop, self.clip)

    def waits(self, plugin: Any) -> Found:
        """Train, and count the waits."""
        counter = per_batch(CALLBACKS[self.callback]())
        kwargs: dict[str, Any] = {
            "accelerator": ACCELERATOR,
            "callbacks": [Poison(gradient=SKIPPED), *counter.callbacks],
            "log_every_n_steps": 1000,
        }
        if self.loop == "automatic" and self.clip != "none":
            kwargs |= {"gradient_clip_val": 0.5, "gradient_clip_algorithm": self.clip}
        if self.callback != "MetricComparison":
            kwargs["limit_val_batches"] = 0
        fit(self.module(), plugin, batches(SKIPPED.stop + 1), **kwargs)  # `GradientMonitor` samples the last one
        if isinstance(plugin, AmpPrecision):
            assert plugin.num_skipped == len(SKIPPED) * self.num_optimizers
        found = [sum(counter.waits[i] for i in part) / len(part) / self.num_optimizers for part in (CLEAN, SKIPPED)]
        return Found(found[0], found[1] if self.expected.skipped is not None else None)


def grid(
    variants: Iterable[tuple[str, bool]] = tuple(VARIANTS), callbacks: Iterable[str] = tuple(CALLBACKS)
) -> Iterator[Case]:
    """Iterate over all loops, of some optimizers with some callbacks."""
    dimensions = (variants, callbacks, get_args(Loop), get_args(Clip), get_args(Precision))
    for (name, fused), callback, loop, clip, precision in itertools.product(*dimensions):
        yield Case(name, fused, loop, clip, precision, callback)


def square(variant: tuple[str, bool], callback: str = "none") -> list[Case]:
    """Return a third of the loops of one optimizer, with each pair of loop, clipping and precision once."""
    cases = list(grid([variant], [callback]))
    shift = VARIANTS.index(variant)
    return [case for i, case in enumerate(cases) if (i // 9 + i // 3 + i + shift) % 3 == 0]


class Looped(Toy):
    """One or two regressions, each with its own optimizer."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], loop: Loop, clip: Clip) -> None:
        super().__init__(make)
        self.net = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
            for _ in range(2 if loop == "two optimizers" else 1)
        )
        self.automatic_optimization = loop == "automatic"
        self.clip = clip

    def loss_of(self, net: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(net(batch).float(), batch.sum(1, keepdim=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss_of(self.net[0], batch)
        optimizers: Any = self.optimizers()
        for net, optimizer in zip(self.net, optimizers if len(self.net) == 2 else [optimizers], strict=True):
            self.manual_backward(self.loss_of(net, batch))
            if self.clip != "none":
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm=self.clip)
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss_of(self.net[0], batch))

    def val_dataloader(self) -> Any:
        return batches(2)

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(net.parameters()) for net in self.net]


# ---- counting -------------------------------------------------------------------------------------------------------


@final
class PretendedWaits:
    """Counts waits on a pretended device, as `SyncWarnings` does on a GPU, and explicit synchronisations too."""

    KINDS = ("sync", "event_synchronize", "stream_synchronize", "device_synchronize")

    def __init__(self) -> None:
        self._before = 0

    def start(self) -> None:
        self._before = self._count()

    def stop(self) -> int:
        return self._count() - self._before

    def _count(self) -> int:
        counts = pretended.core().counts()
        return sum(counts.get(kind, 0) for kind in self.KINDS)


class PerBatch(NamedTuple):
    """Callbacks between one that starts a counter and one that stops it, and the counts of all batches."""

    callbacks: list[L.Callback]
    waits: list[int]


def per_batch(callbacks: list[L.Callback], counter: Any = None) -> PerBatch:
    """Count waits from the start of a batch, which is then on the device, to its end, with these callbacks."""
    counter = counter or (PretendedWaits() if pretended.KIND else SyncWarnings())
    waits: list[int] = []
    first = LambdaCallback(on_train_batch_start=lambda *args: counter.start())
    last = LambdaCallback(
        on_train_batch_end=lambda *args: waits.append(counter.stop()), on_exception=lambda *args: counter.stop()
    )
    return PerBatch([first, *callbacks, last], waits)
