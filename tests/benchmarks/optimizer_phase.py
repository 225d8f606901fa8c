"""Time unscaling, the check, clipping by norm and fused AdamW on 85 M parameters.

`python -m tests.benchmarks.optimizer_phase` uses a GPU if there is one. `--tiny` takes toy sizes, and proves only that
the script works.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from lightning_amp import DynamicLossScaler
from lightning_amp.scaling import OptimizerSteps, RecordLog, StepPlan
from tests.benchmarks._pairs import report, start, time_pairs


class Side:
    """Return the parameters of a 12-layer GPT in 96 tensors (85 M at width 768), with scaled gradients."""

    def __init__(self, width: int, device: torch.device, fused: bool) -> None:
        w = width
        shapes = [(w, 3 * w), (3 * w,), (w, w), (w,), (w, 4 * w), (4 * w,), (4 * w, w), (w,)] * 12
        self.params = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
        self.grads = [torch.randn_like(p) for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, fused=fused)

    def fresh_gradients(self) -> None:
        """Fill the gradients again in the same memory; otherwise they would shrink to denormals, which are slow."""
        for p, g in zip(self.params, self.grads, strict=True):
            p.grad = p.grad.copy_(g) if p.grad is not None else g.clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="toy sizes: does it run?")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    sides = [Side(16 if args.tiny else 768, device, fused) for fused in (True, True, False)]
    number = sum(p.numel() for p in sides[0].params)
    start(f"Optimizer phase: unscale, check, clip by norm, AdamW step; {number / 1e6:.3g} M float32 parameters", device)
    a, b, c = sides
    steps = OptimizerSteps(DynamicLossScaler(1024.0, device=device.type), True, RecordLog(), [a.optimizer])
    one = torch.ones((), device=device)
    steps.scale_loss(one)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    scaler.scale(one)

    def before() -> None:
        # gradients as a backward leaves them: scaled, and not yet seen by an optimizer
        for side in sides:
            side.fresh_gradients()
        grads = [p.grad for p in a.params]
        for p in a.params:
            p.grad = None
        steps.scale_loss(one)
        for p, g in zip(a.params, grads, strict=True):
            p.grad = g

    def folded() -> None:
        steps.step(a.optimizer, lambda: None, lambda: None, StepPlan(fold=True, max_norm=1.0))
        steps.end_round()

    def torchs(side: Side) -> None:
        scaler.unscale_(side.optimizer)
        nn.utils.clip_grad_norm_(side.params, 1.0)
        scaler.step(side.optimizer)
        scaler.update()

    report("against torch: unscale_ + clip_grad_norm_ + fused step",
           *time_pairs(folded, lambda: torchs(b), before=before), target=">= 1.3")  # fmt: skip
    report("against what Lightning allows: unscale_ + clip + plain step",
           *time_pairs(folded, lambda: torchs(c), before=before), target=">= 3")  # fmt: skip


if __name__ == "__main__":
    main()
