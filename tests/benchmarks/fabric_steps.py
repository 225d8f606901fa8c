"""Time a step of `FabricAmpPrecision` against Fabric's own `MixedPrecision`: `python -m tests.benchmarks.fabric_steps`.

Beside each ratio stands the numerical error: the relative distance of the weights from those of fp32 after the same
steps. `--device cuda` takes a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_amp import DynamicLossScaler, FabricAmpPrecision
from tests.benchmarks._models import GPT, UnrolledLSTM, mlp
from tests.benchmarks._pairs import report, start, time_pairs

STEPS = 3
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tiny MLP": (mlp, lambda: torch.randn(32, 32)),
    "GPT, 2 layers of width 128": (lambda: GPT(2, 128, 4), lambda: torch.randn(4, 64, 128)),
    "LSTM cell, 32 times": (lambda: UnrolledLSTM(64), lambda: torch.randn(16, 32, 64)),
}


class Side:
    """One model in one precision, and the steps that it has taken."""

    def __init__(
        self, make: Callable[[], nn.Module], batch: Tensor, plugins: list[Any], device: str, clip: bool
    ) -> None:
        torch.manual_seed(0)
        self.fabric = L.Fabric(accelerator=device, devices=1, plugins=plugins)
        self.net, self.clip = make(), clip
        optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3, foreach=True)
        self.model, self.optimizer = self.fabric.setup(self.net, optimizer)
        self.batch = batch.to(self.fabric.device)

    def __call__(self) -> None:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.fabric.backward(self.model(self.batch).square().mean())
            if self.clip:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()

    def distance_from(self, other: Side) -> float:
        mine, its = (nn.utils.parameters_to_vector(side.net.parameters()).double() for side in (self, other))
        return float((mine - its).norm() / its.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    start("Steps in Fabric, against Fabric's own MixedPrecision", torch.device(args.device))
    for precision in args.precisions:
        for name, (make, batch) in MODELS.items():
            for clip in (False, True):
                scaler = DynamicLossScaler(device=args.device) if precision == "fp16" else None
                stock = MixedPrecision(f"{precision.removeprefix('fp')}-mixed", args.device, scaler)  # type: ignore[arg-type]
                x = batch()
                plugins: list[list[Any]] = [[FabricAmpPrecision(precision)], [stock], []]
                ours, theirs, exact = (Side(make, x, plugin, args.device, clip) for plugin in plugins)
                for _ in range(2):
                    for side in (ours, theirs, exact):
                        side()
                errors = f"error {ours.distance_from(exact):.1e}, theirs {theirs.distance_from(exact):.1e}"
                times = time_pairs(ours, theirs, pairs=args.pairs)
                clipped = ", clipped" if clip else ""
                report(f"{precision} {name}{clipped}", *([t / STEPS for t in side] for side in times), errors)


if __name__ == "__main__":
    main()
