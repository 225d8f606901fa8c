"""Train a small GPT on Python's own documentation, character by character, in several precisions side by side.

python examples/gpt.py                                          fp32 and bf16, from the same seed
python examples/gpt.py --precision bf16 fp8 --compile           on Ada, Hopper or newer: the speed and loss of fp8
python examples/gpt.py --precision bf16 fp8 --emulate           elsewhere: the loss of fp8, not its speed

By default the model is small on a CPU. On a GPU it is so wide that fp8 can be faster: three blocks and 600 million
parameters. That takes 9 GiB with gradients and Adam's state, and as much again for activations; `--width` and
`--batch-size` make it smaller. fp8 needs torchao: `pip install torchao`.

The table shows one run of each precision. `compare_precisions` tells whether a difference in the loss is more than
chance.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from lightning_amp import AmpPrecision

CHARACTERS = 128  # ASCII
RECIPES = ("rowwise_with_gw_hp", "rowwise", "tensorwise")
CPU = {"width": 128, "depth": 2, "heads": 4, "context": 64, "batch_size": 16, "steps": 600}
CUDA = {"width": 4096, "depth": 3, "heads": 32, "context": 1024, "batch_size": 8, "steps": 200}
FAST = {"width": 32, "depth": 2, "heads": 2, "context": 32, "batch_size": 8, "steps": 20}
WARMUP = 10  # first steps that are not timed: they allocate memory and compile


class Documentation(L.LightningDataModule):
    """The texts of `help("FORMATTING")` and other topics; the last tenth is kept for validation.

    They come with every Python, nearly half a million characters. Each release changes a few sentences, so losses are
    comparable between the precisions of one Python.
    """

    def __init__(self, context: int, batch_size: int, steps: int) -> None:
        super().__init__()
        self.batch_size, self.steps = batch_size, steps
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", errors="ignore")
        tokens = torch.tensor(list(text))
        train, val = tokens.split(len(tokens) * 9 // 10)[:2]
        self.train = train.unfold(0, context + 1, 1)  # all windows [windows, context + 1], as views
        self.val = val.unfold(0, context + 1, context)[:128]  # end to end

    def train_dataloader(self) -> DataLoader:
        windows = RandomSampler(range(len(self.train)), replacement=True, num_samples=self.steps * self.batch_size)
        return DataLoader(self.train, self.batch_size, sampler=windows)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)  # type: ignore[arg-type]

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.val[-1:, 1:], batch_size=1)  # type: ignore[arg-type]


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(L.LightningModule):
    """Predicts the next character."""

    def __init__(
        self, width: int, depth: int, heads: int, context: int, lr: float, sample: int, compiled: bool
    ) -> None:
        super().__init__()
        self.lr, self.sample = lr, sample
        self.token = nn.Embedding(CHARACTERS, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        # This layer is not tied to the embedding: logits need more than 8 bits, so fp8 leaves the last `nn.Linear`
        # alone. With `F.linear(x, self.token.weight)` the last one would be inside the last block.
        self.head = nn.Linear(width, CHARACTERS, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # weights that add to the residual stream are smaller in deep models
                last = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if last else 0.02)
        if compiled:
            for block in self.blocks:
                block.compile()  # equal blocks are compiled once

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    @torch.compiler.set_stance("force_eager")  # compiling takes longer than these characters
    def predict_step(self, batch: Tensor, batch_idx: int) -> str:
        """Continue a text by sampling from seed 0, so that equal logits give equal characters."""
        generator = torch.Generator().manual_seed(0)
        tokens = batch
        for _ in range(self.sample):
            logits = self(tokens[:, -self.position.num_embeddings :])[0, -1].float().cpu()
            drawn = torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.view(1, 1).to(tokens.device)], dim=1)
        return bytes(tokens[0, batch.shape[1] :].tolist()).decode("ascii")

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]  # biases and norms are not decayed
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, steps // 10)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Stopwatch(L.Callback):
    """Times whole steps, with data loading: from the end of one batch to the end of the next."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.peak_gib = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # else it would time the launch of a step
            self.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        self.ends_s.append(time.perf_counter())

    def tokens_per_s(self, tokens: int) -> tuple[float, float, float]:
        """Return the median speed after the warm-up, and the quartiles."""
        rates = sorted(tokens / (end - begin) for begin, end in itertools.pairwise(self.ends_s[WARMUP:]))
        return statistics.median(rates), rates[len(rates) // 4], rates[-1 - len(rates) // 4]


def recipe(args: argparse.Namespace) -> Any:
    """Return the name of a recipe, or torchao's configuration of that name with `emulate=True`."""
    if not args.emulate:
        return args.recipe
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(args.recipe), emulate=True, pad_inner_dim=True)


def train(precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train once from seed 0, write the logged metrics into the folder if there is one, and return a row."""
    plugin = AmpPrecision(precision, fp8_recipe=recipe(args) if precision == "fp8" else None)
    stopwatch = Stopwatch()
    torch.compiler.reset()  # drops code compiled for another precision
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    L.seed_everything(0, verbose=False)
    model = GPT(args.width, args.depth, args.heads, args.context, args.lr, args.sample, args.compile)
    data = Documentation(args.context, args.batch_size, args.steps)
    trainer = L.Trainer(
        plugins=[plugin],
        callbacks=[stopwatch],
        devices=1,
        max_epochs=1,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=CSVLogger(args.out, name="gpt", version=precision) if args.out else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    val_loss = float(trainer.callback_metrics["val_loss"])
    (text,) = trainer.predict(model, datamodule=data)
    return {
        "precision": precision if precision != "auto" else f"auto ({plugin.precision})",
        "val_loss": val_loss,
        "tokens_per_s": stopwatch.tokens_per_s(args.batch_size * args.context),
        "peak_gib": stopwatch.peak_gib,
        "fp8": list(plugin.fp8_layers.values()),
        "skipped": plugin.num_skipped,
        "text": text,
    }


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows as a table, with the speed against the first row."""
    lines = [["precision", "val loss", "bits/char", "tokens/s", "middle half", "speed", "fp8 layers", "skipped"]]
    for row in rows:
        median, low, high = row["tokens_per_s"]
        layers = f"{row['fp8'].count(None)} of {len(row['fp8'])}" if row["fp8"] else "-"
        speed = f"{median / rows[0]['tokens_per_s'][0]:.2f}x"
        lines.append([
            row["precision"], f"{row['val_loss']:.4f}", f"{row['val_loss'] / math.log(2):.3f}", f"{median:,.0f}",
            f"{low:,.0f} to {high:,.0f}", speed, layers, str(row["skipped"]),
        ])  # fmt: skip
    if any(row["peak_gib"] for row in rows):
        for line, cell in zip(lines, ["peak GiB", *(f"{row['peak_gib']:.1f}" for row in rows)], strict=True):
            line.append(cell)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def about_speed(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return a note on the limits of the measured speeds."""
    if args.emulate and "fp8" in {row["precision"] for row in rows}:
        return "fp8 is emulated: its loss is as on a device with fp8, its speed is not.\n"
    if not torch.cuda.is_available():
        return "These speeds are of a small model on this CPU; they say nothing about a GPU.\n"
    return ""


def arguments() -> argparse.Namespace:
    """Parse the command line; defaults depend on the device."""
    cuda = torch.cuda.is_available()
    both = ["fp32", "bf16" if not cuda or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=both, choices=["auto", "fp32", "bf16", "fp16", "fp8"])
    parser.add_argument("--compile", action="store_true", help="compile the blocks; fp8 is not faster without it")
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0], help="how fp8 scales values")
    parser.add_argument("--emulate", action="store_true", help="emulate fp8 on a device without it")
    for name, value in (CUDA if cuda else CPU).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default here: {value}")
    parser.add_argument(
        "--lr", type=float, help="the highest; default: 2e-3 at width 128, inversely proportional to the width"
    )
    parser.add_argument("--sample", type=int, default=300, help="how many characters to write at the end")
    parser.add_argument("--fast", action="store_true", help="a tiny model and 20 steps: does it run?")
    parser.add_argument("--out", type=Path, help="folder for the losses (CSV); default: none is written")
    args = parser.parse_args()
    for name, value in (FAST if args.fast else CUDA if cuda else CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.lr = args.lr or 2e-3 * 128 / args.width
    args.sample = min(args.sample, 20) if args.fast else args.sample
    if args.steps < WARMUP + 2:
        parser.error(f"--steps must be at least {WARMUP + 2}: speeds are taken after {WARMUP}")
    return args


def main() -> None:
    """Train in one precision after the other, and print one table."""
    args = arguments()
    for advice in (".*does not have many workers", ".*treespec, LeafSpec", ".*TensorFloat32 tensor cores"):
        warnings.filterwarnings("ignore", advice)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    for precision in args.precision:
        print(f"training in {precision}: {args.steps} steps ...", file=sys.stderr, flush=True)
        rows.append(train(precision, args))
    print(f"\n{as_table(rows)}\n\n{about_speed(rows, args)}", end="")
    print(f"\nWritten by the model trained in {rows[-1]['precision']}:\n\n{rows[-1]['text']}")


if __name__ == "__main__":
    main()
