"""Modules and data for tests of whole runs: factories that another process can import, and runs in this process."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.regression import MeanAbsoluteError
from typing_extensions import override

from lightning_amp import AmpPrecision
from lightning_amp.compare import Run, Spec
from lightning_amp.compare._train import train

TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


class Waves(L.LightningModule):
    """A regression with dropout, its own noise, and metrics of both kinds."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 1))
        self.mae = MeanAbsoluteError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.01 * torch.randn_like(x) + 0.001 * random.random()
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        predicted = self.net(x)
        self.mae(predicted, y)
        self.log("distance", self.mae)
        self.log("val_loss", nn.functional.mse_loss(predicted, y))
        self.log("thing", predicted.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Sea(L.LightningDataModule):
    """128 rows in batches of 8; the last fourth is for validation."""

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(128, 8, generator=generator)
        self.data = TensorDataset(x, x.sin().sum(1, keepdim=True))

    def train_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(self.data, range(96)), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(self.data, range(96, 128)), batch_size=16)


class NoisyPrecision(MixedPrecision):
    """Worse on purpose: after each step the weights are changed a little."""

    def __init__(self, noise: float = 0.3) -> None:
        super().__init__("bf16-mixed", "cpu")
        self.noise = noise

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        out = super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for p in kwargs["model"].parameters():
                p.add_(self.noise * torch.ones_like(p))
        return out


class FailsInFp16(Waves):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.precision_plugin.precision == "16-mixed":
            raise ArithmeticError("no fp16 here | really\nnot")


def sleeps() -> L.LightningModule:
    """Prints its process id, and hangs."""
    Path(os.environ["SLEEPER"]).write_text(str(os.getpid()))
    time.sleep(120)
    raise AssertionError


def raises() -> L.LightningModule:
    error = RuntimeError("no module today")
    vars(error)["__notes__"] = ["Come back tomorrow."]  # as `add_note` of Python 3.11 does
    raise error


def not_a_module() -> int:
    return 1


def here(spec: Spec, on_progress: Callable[..., object] = lambda *_: None) -> Run:
    """Train in this process instead of `run_in_process`, which takes seconds to import everything."""
    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return train(spec, time.time())


def spec(
    folder: Path, source: Any = "fp32", module: Any = Waves, data: Any = Sea, moved: bool = False, **changes: Any
) -> Spec:
    """Return one arm with one seed."""
    source = {"precision": source} if isinstance(source, str) else source
    return Spec("arm", source, 3, moved, module, data, {**TRAINER, **changes}, str(folder))


def by_hand(plugin: Any, module: Any = Waves, data: Any = Sea, seed: int = 3, **changes: Any) -> L.Trainer:
    """Train as a user would, and keep all validation metrics."""

    class Notes(L.Callback):
        def __init__(self) -> None:
            self.seen: dict[str, list[float]] = {}

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if not trainer.sanity_checking:
                for name, value in trainer.callback_metrics.items():
                    self.seen.setdefault(name, []).append(float(value))

    L.seed_everything(seed, verbose=False)
    model, datamodule, notes = module(), data(), Notes()
    kwargs = {**TRAINER, "enable_progress_bar": False, **changes}
    trainer = L.Trainer(**kwargs, callbacks=[notes], plugins=[plugin or AmpPrecision("fp32")])
    trainer.fit(model, datamodule=datamodule)
    trainer.notes = notes.seen
    return trainer
