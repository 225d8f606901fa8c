"""Pretrain a small GPT with Fabric, in litgpt's way: fused AdamW, clipping, accumulation, warmup, checkpoints.

python examples/fabric_gpt.py                                    fp32, bf16 and fp16, from the same seed
python examples/fabric_gpt.py --precision fp16 --out runs        one of them, with checkpoints and the scale history
python examples/fabric_gpt.py --precision fp16 --resume runs/fp16/step-00050.ckpt    continue from a checkpoint
torchrun --nproc-per-node=2 examples/fabric_gpt.py --precision fp16                  shard the model with FSDP2

With Fabric's own `precision="16-mixed"` this loop raises an error in `clip_gradients`, because the optimizer is fused.
Fabric also refuses that precision with FSDP2, and does not save the loss scale.

`amp.on_applied(scheduler.step)` advances the schedule only if the step was applied. It does not wait for the device.
Each rank takes its share of the same global batch, so any number of ranks trains the same model within rounding.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from gpt import CHARACTERS, Block, Documentation
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_amp import FabricAmpPrecision
from lightning_amp.reports import ScaleHistory

ACCUMULATE = 4  # backwards in each optimizer step
SIZE = {"width": 64, "depth": 2, "heads": 4, "context": 64, "global_batch": 32, "steps": 100, "save_every": 50}
FAST = {"width": 32, "depth": 2, "heads": 2, "context": 32, "global_batch": 16, "steps": 40, "save_every": 20}


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(CHARACTERS, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard the blocks one by one, then the rest, over all ranks."""
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of the next characters, in nats."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def micro_batch(windows: Tensor, number: int, size: int, fabric: L.Fabric) -> Tensor:
    """Draw one batch for all ranks, by its number in the run, and return the share of this rank."""
    drawn = torch.randint(len(windows), (size,), generator=torch.Generator().manual_seed(number))
    return windows[drawn[fabric.global_rank :: fabric.world_size]].to(fabric.device)


@torch.no_grad()
def validate(fabric: L.Fabric, model: nn.Module, windows: Tensor) -> float:
    model.eval()
    losses = [loss_of(model, part.to(fabric.device)) for part in windows.split(32)]
    model.train()
    return torch.stack(losses).mean().item()


def train(precision: str, args: argparse.Namespace) -> None:
    """Train from seed 0 or from a checkpoint, and print a line of results."""
    amp = FabricAmpPrecision(precision)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fsdp2 = ModelParallelStrategy(
        shard, data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    fabric = L.Fabric(
        strategy=fsdp2 if ranks > 1 else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        plugins=[amp],
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    data = Documentation(args.context, args.global_batch, args.steps)

    model = fabric.setup(GPT(args.width, args.depth, args.heads, args.context))
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warmup = max(1, args.steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, factor)
    optimizer = fabric.setup_optimizers(adamw)

    state = {"amp": amp, "model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    history = ScaleHistory.following(amp.records)
    if args.out:
        (args.out / precision).mkdir(parents=True, exist_ok=True)
    if args.resume:
        fabric.load(args.resume, state)
    before = validate(fabric, model, data.val)

    while state["step"] < args.steps:
        for part in range(ACCUMULATE):
            number = state["step"] * ACCUMULATE + part
            windows = micro_batch(data.train, number, args.global_batch // ACCUMULATE, fabric)
            with fabric.no_backward_sync(model, enabled=part + 1 < ACCUMULATE):
                fabric.backward(loss_of(model, windows) / ACCUMULATE)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        amp.on_applied(scheduler.step)
        optimizer.zero_grad()
        state["step"] += 1
        if args.out and state["step"] % args.save_every == 0:
            amp.flush()  # the schedule advances before it is saved
            fabric.save(args.out / precision / f"step-{state['step']:05d}.ckpt", state)

    after = validate(fabric, model, data.val)
    amp.flush()
    if args.out and fabric.is_global_zero:
        history.to_csv(args.out / precision / "scale_history.csv")
    losses = f"{before:.3f} -> {after:.3f}"
    fabric.print(f"{amp.precision:<10}  nats per character {losses}   {history.summary()}", flush=True)


def main() -> None:
    """Parse arguments, and train in one precision after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "fp16"], help="fp32, bf16, fp16 or auto")
    parser.add_argument("--steps", type=int, help=f"optimizer steps ({SIZE['steps']})")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate (3e-3)")
    parser.add_argument("--resume", type=Path, help="a checkpoint of the same precision")
    parser.add_argument("--fast", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--out", type=Path, help="folder for checkpoints and scale histories; default: none is written")
    args = parser.parse_args()
    for name, value in (FAST if args.fast else SIZE).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.resume and len(args.precision) > 1:
        parser.error("--resume needs --precision with one precision")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for precision in args.precision:
        train(precision, args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
