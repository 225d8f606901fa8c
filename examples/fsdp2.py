"""Train on handwritten digits with parameters, gradients and optimizer state sharded over all ranks (FSDP2), in fp16.

python examples/fsdp2.py                                         one process
torchrun --nproc-per-node=2 examples/fsdp2.py                    two processes of one machine, GPUs or CPU alike
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HOST:29500 examples/fsdp2.py  on each of two
srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python examples/fsdp2.py                   the same under SLURM

As a SLURM batch script (`sbatch`), with the resources in its head and no torchrun:

    #SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8
    srun python examples/fsdp2.py

`configure_model` shards the layers, as Lightning's `ModelParallelStrategy` requires. Lightning refuses
`precision="16-mixed"` there; the plugin works: an overflow in the shard of one rank skips the step on all ranks.
All four callbacks work on the sharded module.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_amp import (
    AmpPrecision,
    DynamicLossScaler,
    GradientMonitor,
    MetricComparison,
    OverflowLocator,
    ScaleMonitor,
)

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f"This example needs scikit-learn ({error}). Run: pip install '.[examples]'") from error


class Block(nn.Module):
    """A residual layer, whose shards are gathered for its forward and backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Classifier(L.LightningModule):
    """Classifies 8 x 8 digits."""

    def __init__(self, width: int = 128, depth: int = 3, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 10))
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net:
            if isinstance(block, Block):
                fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_acc(self.net(images), labels)
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def main() -> None:
    """Parse arguments, train, print from rank zero."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="fp16", help="fp32, bf16, fp16 or auto")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--fast", action="store_true", help="three epochs")
    parser.add_argument("--out", help="folder for the scale history; default: none is written")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)

    L.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    train, val = random_split(data, [0.8, 0.2])

    # The first scale is too high on purpose, so that all ranks skip some steps before it settles.
    scaler = DynamicLossScaler(2.0**24) if args.precision == "fp16" else None
    plugin = AmpPrecision(args.precision, scaler=scaler)
    gradients, comparison = GradientMonitor(every_n_steps=20), MetricComparison(every_n_epochs=5)
    callbacks = [ScaleMonitor(dirpath=args.out), OverflowLocator(), gradients, comparison]
    devices = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    trainer = L.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=devices * num_nodes, tensor_parallel_size=1),
        devices=devices,
        num_nodes=num_nodes,
        plugins=[plugin],
        callbacks=callbacks,
        max_epochs=3 if args.fast else args.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=64))

    if trainer.is_global_zero:
        scale = "none" if plugin.last_step is None else f"{plugin.last_step.next_scale:g}"
        print(f"{plugin.precision}, {trainer.world_size} ranks: loss scale {scale}, {plugin.num_steps} steps applied,"
              f" {plugin.num_skipped} skipped, accuracy {trainer.callback_metrics['val_acc']:.1%}")  # fmt: skip
        print(f"\nThe same weights validated in fp32:\n{comparison.table}")
        print(f"\nGradients against fp32:\n{gradients.table}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
