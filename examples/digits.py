"""Train a small vision transformer on handwritten digits, in one precision or in three.

python examples/digits.py --precision fp16      one run
python examples/digits.py --demo                fp32, bf16 and fp16 from the same seed, side by side

Mixed precision adds one plugin and two callbacks to an ordinary Lightning script: see `train`. The digits ship inside
scikit-learn.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_amp import AmpPrecision, DynamicLossScaler, MetricComparison, ScaleMonitor
from lightning_amp.measure import SpeedComparison

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f"This example needs scikit-learn ({error}). Run: pip install '.[examples]'") from error

SIZE = 32  # pixels
PATCH = 8  # pixels
HEAD = 64  # width of one attention head
BATCH_SIZE = 64
PRECISIONS = ("fp32", "bf16", "fp16")
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
ON_CPU: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
SMALL = {"width": 64, "depth": 1}
RACE_STEPS = 6  # in each precision and round; the first two warm up


class Digits(L.LightningDataModule):
    """1,797 handwritten digits, scaled up from 8 x 8 to 32 x 32 pixels; every fifth is kept for validation."""

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
        images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear")
        images = (images - images.mean()) / images.std()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        data = TensorDataset(images[order], torch.tensor(labels)[order])
        held_out = len(data) // 5
        self.val = torch.utils.data.Subset(data, range(held_out))
        self.train = torch.utils.data.Subset(data, range(held_out, len(data)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=120)


class Attention(nn.Module):
    """Self-attention from matrix products, since the fused kernel has no fast half-precision backward on a CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / HEAD**0.5).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width))
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class DigitTransformer(L.LightningModule):
    """A vision transformer on 4 x 4 patches, made by unfolding, since fp16 convolutions are slow on a CPU."""

    def __init__(self, width: int = 256, depth: int = 3, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        tokens = (SIZE // PATCH) ** 2
        self.patches = nn.Unfold(PATCH, stride=PATCH)
        self.embed = nn.Linear(PATCH**2, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Flatten(), nn.Linear(tokens * width, 10))
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(self.patches(images).mT) + self.position))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log("val_acc", self.val_acc, prog_bar=True)
        self.log("val_loss", F.cross_entropy(logits, labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps, pct_start=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Stopwatch(L.Callback):
    """Times the training batches without validation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def train(
    precision: str, out: Path, *, size: Mapping[str, int] | None = None, epochs: int = 4, **trainer_kwargs: Any
) -> dict[str, Any]:
    """Train once, write CSV files and a picture into `out`, and return a row of the table."""
    # 2^24 is far too high for this model: the first steps overflow, are skipped, and the scale comes down. It tries a
    # higher one every 30 good steps. With `scaler=None` it would start at 2^16 and try after 2,000.
    scaler = DynamicLossScaler(init_scale=2.0**24, growth_interval=30) if precision == "fp16" else None
    plugin = AmpPrecision(precision, scaler=scaler)
    monitor, comparison, stopwatch = ScaleMonitor(), MetricComparison(), Stopwatch()

    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        plugins=[plugin],
        callbacks=[monitor, comparison, stopwatch],
        max_epochs=epochs,
        **ON_CPU,
        **trainer_kwargs,
    )
    trainer.fit(DigitTransformer(**(size or {})), datamodule=Digits())

    out.mkdir(parents=True, exist_ok=True)
    monitor.history.to_csv(out / f"{precision}_scale_history.csv")
    comparison.to_csv(out / f"{precision}_comparison.csv")
    if scaler is not None:
        monitor.plot(out / f"{precision}_scale_history.png")
    last = {row.metric: row for row in comparison.table}
    accuracy, loss = last["val_acc"], last["val_loss"]
    return {
        "precision": precision,
        "val_acc": f"{accuracy.amp:.2%}",
        "same weights in fp32": f"{accuracy.fp32:.2%}",
        "difference in val_acc": f"{100 * accuracy.diff:+.2f} pt",
        "difference in val_loss": f"{loss.diff:+.1e}",
        "steps": plugin.num_steps,
        "skipped": plugin.num_skipped,
        "final scale": f"2**{math.log2(scaler.get_scale()):g}" if scaler is not None else "-",
        "samples/s": f"{BATCH_SIZE / median(stopwatch.seconds[5:]):,.0f}",
    }


def demo(out: Path, *, fast: bool) -> tuple[list[dict[str, Any]], str]:
    """Train in three precisions from the same seed; return the rows, and a note on their speed."""
    for advice in (".*does not have many workers", ".*treespec, LeafSpec"):
        warnings.filterwarnings("ignore", advice)
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    slow = {} if fast else slow_formats()
    size = SMALL if fast or slow else {}
    rows: list[dict[str, Any]] = []
    for precision in PRECISIONS:
        print(f"training in {precision} ...", file=sys.stderr, flush=True)
        rows.append(train(precision, out, size=size, epochs=2 if fast else 4, **QUIET))
    print("measuring the speed of each ...", file=sys.stderr, flush=True)
    rounds = 1 if fast else 5
    step_s = race(PRECISIONS, size, rounds)
    speeds = compared(step_s)
    for row in rows:
        row["samples/s"] = f"{BATCH_SIZE / geometric_mean(step_s[row['precision']]):,.0f}"
        row["speed"] = str(speeds.get(row["precision"], "-"))
    quick = [name for name in speeds if name not in slow]
    full = compared(race(["fp32", *quick], {}, rounds)) if size and quick and not fast else {}
    return rows, about_speed(slow, speeds, full, rounds)


def race(precisions: Sequence[str], size: Mapping[str, int], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a training step in each round. A round trains a few steps in each precision.

    The order of the precisions turns round from one round to the next, so that a machine that becomes busy slows all.
    """
    step_s: dict[str, list[float]] = {precision: [] for precision in precisions}
    for turn in range(rounds):
        for precision in precisions if turn % 2 == 0 else reversed(precisions):
            stopwatch = Stopwatch()
            plugins, callbacks = [AmpPrecision(precision)], [stopwatch]
            trainer = L.Trainer(
                plugins=plugins, callbacks=callbacks, max_steps=RACE_STEPS, limit_val_batches=0, **ON_CPU, **QUIET
            )
            trainer.fit(DigitTransformer(**size), datamodule=Digits())
            step_s[precision].append(median(stopwatch.seconds[2:]))
    return step_s


def compared(step_s: Mapping[str, Sequence[float]]) -> dict[str, SpeedComparison]:
    """Return the speed of each other precision against fp32: a ratio and its 99 % interval over the rounds."""
    return {
        name: SpeedComparison.of((math.log(a / b) for a, b in zip(times, step_s["fp32"], strict=True)), level=0.99)
        for name, times in step_s.items()
        if name != "fp32"
    }


def about_speed(
    slow: Mapping[str, float], speeds: Mapping[str, SpeedComparison], full: Mapping[str, SpeedComparison], rounds: int
) -> str:
    """Say how the speed was measured, why the model is small, and which precision is slower than fp32."""
    lines: list[str] = []
    if rounds > 1:
        lines.append(
            f"Speed against fp32, 99 % interval: {rounds} rounds of {RACE_STEPS} steps in each precision, in turn."
        )
    if slow:
        costs = " and ".join(f"{cost:.0f} times as long in {name}" for name, cost in slow.items())
        lines.append(f"On this CPU a matrix product takes {costs} as in fp32. The demo therefore trains a small model.")
    lines += [f"The full model (256 wide, 3 blocks) in {name}: {speed}." for name, speed in full.items()]
    claims = {name: speed.claim for name, speed in {**speeds, **full}.items()}
    slower = [name for name, claim in claims.items() if claim == "slower"]
    if slower:
        advice = "" if "faster" in claims.values() else " Train in fp32 here."
        lines.append(f"Slower than fp32 on this CPU: {' and '.join(slower)}.{advice}")
    return "".join(f"{line}\n" for line in lines)


def slow_formats() -> dict[str, float]:
    """Return the formats in which a matrix product takes more than eight times as long as in fp32, and how long."""
    return {name: cost for name, cost in matmul_costs().items() if cost > 8}


def matmul_costs() -> dict[str, float]:
    """Time matrix products in bf16 and fp16 over fp32; without hardware instructions the ratio is about forty."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that `thread_time` measures the product alone
    cost_s: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        matrix = torch.ones(256, 256, dtype=dtype)
        times_s: list[float] = []
        for _ in range(10):
            started = time.thread_time()
            matrix @ matrix
            times_s.append(time.thread_time() - started)
        cost_s[dtype] = min(times_s)
    torch.set_num_threads(threads)
    one = cost_s[torch.float32]
    return {"bf16": cost_s[torch.bfloat16] / one, "fp16": cost_s[torch.float16] / one}


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows side by side."""
    grid = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in grid) for column in range(len(grid[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in grid]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp16", help="fp32, bf16, fp16 (default) or auto")
    parser.add_argument("--demo", action="store_true", help="fp32, bf16 and fp16 side by side")
    parser.add_argument("--fast", action="store_true", help="a small model, an epoch or two: does it run?")
    parser.add_argument("--out", type=Path, default=Path("demo_results"), help="folder for CSV files and the picture")
    args = parser.parse_args()
    if args.demo:
        rows, note = demo(args.out, fast=args.fast)
    else:
        rows, note = [train(args.precision, args.out, **({"size": SMALL, "epochs": 1} if args.fast else {}))], ""
    print(f"\n{as_table(rows)}\n\n{note}", end="")
    print(f"The history of the loss scale (CSV; PNG for fp16) and the comparisons (CSV) are in {args.out}/.")


if __name__ == "__main__":
    main()
