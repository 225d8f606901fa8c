"""Unscale, check, clip by norm, fused AdamW on 85 M parameters: `python -m tests.benchmarks.optimizer_phase`."""

from __future__ import annotations

import torch
from torch import nn

from lightning_amp import DynamicLossScaler
from lightning_amp.scaling import OptimizerSteps, RecordLog, StepPlan
from tests.benchmarks._pairs import report, start, time_pairs


class Side:
    """85 M parameters in 148 tensors, the shapes of a 12-layer GPT of width 768, and scaled gradients."""

    def __init__(self, fused: bool) -> None:
        shapes = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,)] * 12
        self.params = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        self.grads = [torch.randn_like(p) for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, fused=fused)

    def fresh_gradients(self) -> None:
        """Scaled gradients again, in the same memory: left alone they would shrink to denormals, which are slow."""
        for p, g in zip(self.params, self.grads, strict=True):
            p.grad = p.grad.copy_(g) if p.grad is not None else g.clone()


def main() -> None:
    start("Optimizer phase: unscale, check, clip by norm, AdamW step; 85 M float32 parameters")
    a, b, c = Side(True), Side(True), Side(False)
    steps = OptimizerSteps(DynamicLossScaler(1024.0), True, RecordLog(), [a.optimizer])
    steps.scale_loss(torch.ones(()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))

    def before() -> None:
        # what a backward leaves: scaled gradients, which no optimizer has seen
        for side in (a, b, c):
            side.fresh_gradients()
        grads = [p.grad for p in a.params]
        for p in a.params:
            p.grad = None
        steps.scale_loss(torch.ones(()))
        for p, g in zip(a.params, grads, strict=True):
            p.grad = g

    def folded() -> None:
        steps.step(a.optimizer, lambda: None, lambda: None, StepPlan(fold=True, max_norm=1.0))
        steps.finish_batch()

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
