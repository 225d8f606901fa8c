"""Does mixed precision cost me accuracy? Where? And how do I get it back?

A script to read from top to bottom, or to run cell by cell (`# %%`). It needs a CPU and less than a minute:

    python examples/metric_comparison.py

1. A model that learns a sound wave from (time, value) pairs, as networks with rotary or Fourier positions do.
2. Trained in bf16, with one more callback: `MetricComparison` says what the same weights score in fp32.
3. One argument, `fp32_modules`, keeps the part that needs the digits in fp32.
"""

# %% Arguments, for the tests of this script; in a notebook, set `args` by hand.
from __future__ import annotations

import argparse
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.regression import MeanAbsoluteError, R2Score

from lightning_amp import AmpPrecision, MetricComparison

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--fast", action="store_true", help="fewer epochs: does it run?")
parser.add_argument("--out", type=Path, default=Path("comparison_results"), help="folder for the tables, as CSV")
args = parser.parse_args()

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)  # keeps the output to what this script prints
for advice in (".*does not have many workers", ".*treespec, LeafSpec", ".*number of training batches"):
    warnings.filterwarnings("ignore", advice)


# %% The data: one second of a sound; the model learns some samples and predicts the others.
def wave(times: Tensor) -> Tensor:
    """Three tones and a sweep."""
    tones = sum(torch.sin(2 * math.pi * f * times + f) / 3 for f in (5, 17, 31))
    return tones + 0.5 * torch.sin(2 * math.pi * (8 + 12 * times) * times)


def make_loaders() -> tuple[DataLoader, DataLoader]:
    times = torch.rand(6144, 1, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(times, wave(times))
    train, val = torch.utils.data.Subset(data, range(4096)), torch.utils.data.Subset(data, range(4096, 6144))
    return DataLoader(train, batch_size=256, shuffle=True), DataLoader(val, batch_size=1024)


# %% The model. `Phases` is a matrix product, so autocast computes it in bf16, whose numbers have two to three digits. A
# phase of 200 radians is then known to within half a radian, and its sine is mostly noise. Rotary embeddings have this
# problem at position 200, and writing `.float()` in them does not help: autocast casts the arguments back.
class Phases(nn.Module):
    """Phase of each frequency at each time: [batch, 1] -> [batch, frequencies], in radians."""

    frequencies: Tensor

    def __init__(self, frequencies: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2 * math.pi * torch.arange(1.0, frequencies + 1)[None])

    def forward(self, times: Tensor) -> Tensor:
        return times.float() @ self.frequencies.float()


class Wave(L.LightningModule):
    """A small network on sines and cosines of the phases, without any code for mixed precision."""

    def __init__(self, frequencies: int = 48, width: int = 64) -> None:
        super().__init__()
        self.position = Phases(frequencies)
        self.net = nn.Sequential(nn.Linear(2 * frequencies, width), nn.GELU(), nn.Linear(width, 1))
        self.val_r2, self.val_mae = R2Score(), MeanAbsoluteError()

    def forward(self, times: Tensor) -> Tensor:
        phases = self.position(times)
        return self.net(torch.cat([phases.sin(), phases.cos()], dim=-1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        times, values = batch
        return F.mse_loss(self(times).float(), values)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        times, values = batch
        predictions = self(times)
        self.val_r2(predictions, values)
        self.val_mae(predictions, values)
        self.log_dict({"val_r2": self.val_r2, "val_mae": self.val_mae})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


# %% Training: an ordinary Trainer with a plugin and a callback. The comparison costs one more validation pass, in fp32.
def train(**precision: Any) -> MetricComparison:
    L.seed_everything(0, verbose=False)
    comparison = MetricComparison(every_n_epochs=2 if args.fast else 5, tolerance={"val_r2": 0.001})
    trainer = L.Trainer(
        plugins=[AmpPrecision(**precision)],
        callbacks=[comparison],
        max_epochs=6 if args.fast else 20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Wave(), *make_loaders())
    return comparison


# %% First try: all in bf16. `amp` is the metric of validation; `fp32` is the metric of the same weights on the same
# batches in full precision; `diff` is the cost of mixed precision.
print("\nbf16:\n")
everywhere = train(precision="bf16")
print(everywhere.table)

# %% The cost is above the tolerance, so some module needs more digits. The warning names `position`: the callback tried
# it in fp32. Rules are names (`"position"`, `"*.norm"`) or classes; `Phases` itself would do as well. The rest of the
# model, where the time goes, stays in bf16.
print("\nbf16, and `position` in fp32:\n")
with_island = train(precision="bf16", fp32_modules=["position"])
print(with_island.table)

# %% The tables as files, for a spreadsheet.
args.out.mkdir(parents=True, exist_ok=True)
everywhere.to_csv(args.out / "bf16.csv")
with_island.to_csv(args.out / "bf16_fp32_modules.csv")
before, after = ({row.metric: row for row in c.table} for c in (everywhere, with_island))
print(f"\nR2 of the last epoch: {before['val_r2'].amp:.3f} -> {after['val_r2'].amp:.3f}")
print(f"cost of bf16 in R2: {before['val_r2'].diff:+.3f} -> {after['val_r2'].diff:+.6f}")
print(f"The tables are in {args.out}/.")
