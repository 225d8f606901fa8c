"""Faulty models, and the messages of the callbacks and the doctor about them: docs/guide/symptoms.md.

python examples/symptoms.py                     all of them
python examples/symptoms.py nan-loss            one: nan-loss, falling-scale, many-skips, accuracy, speed, memory

Each prints the messages for a faulty model, and then for the same model after the advice was followed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp import (
    AmpPrecision,
    DynamicLossScaler,
    GradientMonitor,
    MetricComparison,
    OverflowLocator,
    ScaleMonitor,
    doctor,
)


class Regression(L.LightningModule):
    """A small network. `loss_factor` and `middle` add a fault."""

    def __init__(self, middle: nn.Module | None = None, loss_factor: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.middle = middle or nn.Identity()
        self.head = nn.Linear(32, 1)
        self.loss_factor, self.offset = loss_factor, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.encoder(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).float(), y) * self.loss_factor

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        # A large number is added to the output in half precision, which loses most digits of the output.
        prediction = self(x) + self.offset
        self.log("val_loss", nn.functional.mse_loss(prediction.float() - self.offset, y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Energy(nn.Module):
    """An activation beyond 65504, the largest number that fp16 has."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e5


def data(bad_batches: tuple[int, ...] = (), batches: int = 120) -> DataLoader[Any]:
    x = torch.randn(16 * batches, 8, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    for index in bad_batches:
        x[16 * index, 0] = float("nan")
    return DataLoader(TensorDataset(x, y), batch_size=16)


def fit(module: L.LightningModule, plugin: AmpPrecision, *callbacks: L.Callback, loader: Any = None) -> L.Trainer:
    torch.manual_seed(0)
    for parameter in module.modules():
        if isinstance(parameter, nn.Linear):
            parameter.reset_parameters()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, plugins=[plugin], callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader or data(), data(batches=8))
    return trainer


def fp16(scale: float = 2.0**16) -> AmpPrecision:
    # The default scale, but without the default that 64 skips in a row stop the run.
    return AmpPrecision("fp16", scaler=DynamicLossScaler(scale, max_consecutive_skips=1000))


def nan_loss() -> None:
    """The loss is NaN."""
    fit(Regression(Energy()), fp16(), OverflowLocator(max_reports=1))
    print("\nwith 'bf16':")
    fit(Regression(Energy()), AmpPrecision("bf16"), OverflowLocator(), ScaleMonitor())
    print("\nwith what makes and takes the large number in fp32:")
    plugin = AmpPrecision("fp16", fp32_modules=["middle", "head"])
    fit(Regression(Energy()), plugin, OverflowLocator(), ScaleMonitor())


def falling_scale() -> None:
    """The scale keeps falling."""
    fit(Regression(loss_factor=1e8), fp16(), ScaleMonitor(10), OverflowLocator(max_reports=1), GradientMonitor())
    print("\nwith the loss divided:")
    fit(Regression(loss_factor=1.0), fp16(), ScaleMonitor(10), OverflowLocator())


def many_skips() -> None:
    """Many steps are skipped."""
    bad = tuple(range(0, 120, 3))
    fit(Regression(), fp16(), ScaleMonitor(10), OverflowLocator(max_reports=1), loader=data(bad))
    print("\nwithout the bad rows:")
    fit(Regression(), fp16(), ScaleMonitor(10), OverflowLocator())


def accuracy() -> None:
    """The accuracy dropped."""
    print("in training: gradients that become zero")
    fit(Regression(loss_factor=1e-7), AmpPrecision("fp16", scaler=1.0), GradientMonitor(50), MetricComparison())
    print("\nwith the recommended scale:")
    fit(Regression(loss_factor=1e-7), fp16(2.0**24), GradientMonitor(50), MetricComparison())
    print("\nin validation: the same weights are better in fp32")
    fit(Regression(offset=1000.0), AmpPrecision("bf16"), MetricComparison(tolerance=0.1))
    print("\nwith eval_precision='fp32':")
    fit(Regression(offset=1000.0), AmpPrecision("bf16", eval_precision="fp32"), MetricComparison())


def speed() -> None:
    """It is not faster."""
    print("a small one:")
    examine(lambda: Deep(width=8), rows=16, code="model-too-small")
    print("\na larger one, with autocast turned off in its forward:")
    examine(lambda: Deep(width=512, autocast=False), rows=512, code="autocast-off")
    print("\nand with autocast on:")
    examine(lambda: Deep(width=512), rows=512)


def memory() -> None:
    """The memory did not fall."""
    report = str(doctor(lambda: Deep(width=512), lambda: Rows(16), precision="bf16", device="cpu"))
    print(next(part for part in report.split("\n\n") if part.startswith("| memory at the peak")))


def examine(make_module: Callable[[], L.LightningModule], rows: int, code: str = "") -> None:
    """Print one finding of the doctor, or the times and the memory of a step if no code is given."""
    report = doctor(make_module, lambda: Rows(rows), precision="bf16", device="cpu")
    if not code:
        print(textwrap.fill(str(report).split("\n\n")[1], 110))
    for finding in report.findings:
        if finding.code == code:
            print(textwrap.fill(f"{finding.code}: {finding.message}", 110))
            if finding.action:
                print(textwrap.fill(f"-> {finding.action}", 110))


class Deep(L.LightningModule):
    """A deep network, whose `forward` may turn autocast off."""

    def __init__(self, width: int, autocast: bool = True) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(32, width), *layers, nn.Linear(width, 1))
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        if self.autocast:
            return self.net(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).float(), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


class Rows(L.LightningDataModule):
    """Random rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self) -> Any:
        x = torch.randn(8 * self.rows, 32)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.rows)


SYMPTOMS: dict[str, Callable[[], None]] = {
    "nan-loss": nan_loss,
    "falling-scale": falling_scale,
    "many-skips": many_skips,
    "accuracy": accuracy,
    "speed": speed,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("symptom", nargs="?", choices=SYMPTOMS, help="default: all")
    parser.add_argument("--fast", action="store_true", help="accepted by every example; this one is fast anyway")
    parser.add_argument("--out", type=Path, help="accepted by every example; this one writes no files")
    args = parser.parse_args()
    show_only_the_callbacks()
    for name in [args.symptom] if args.symptom else SYMPTOMS:
        print(f"--- {name}: {SYMPTOMS[name].__doc__}")
        SYMPTOMS[name]()
        print()


def show_only_the_callbacks() -> None:
    """Print all messages to standard output, except Lightning's own about the hardware."""
    ours = ("ScaleMonitor", "GradientMonitor", "MetricComparison")
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: record.name.startswith("lightning_amp") or record.getMessage().startswith(ours))
    for name in ("lightning.pytorch", "lightning_amp"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message).startswith(
            ("The loss scale fell", "`OverflowLocator", "`GradientMonitor", "`MetricComparison")
        ) or "optimizer steps were skipped" in str(message):
            print(f"warning: {message}")

    warnings.showwarning = show


if __name__ == "__main__":
    main()
