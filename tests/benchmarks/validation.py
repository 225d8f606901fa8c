"""Time a compared validation against its two passes: `python -m tests.benchmarks.validation`."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_amp import AmpPrecision, MetricComparison
from tests.benchmarks._pairs import report, start


class Validated(L.LightningModule):
    """Eight blocks of width 512, and a logged loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU())))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).float().pow(2).mean())


def validation(precision: str, callbacks: list[L.Callback]) -> Any:
    """Run one validation of 60 batches; return its seconds."""
    trainer = L.Trainer(
        accelerator="cpu", plugins=[AmpPrecision(precision)], callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader([torch.randn(256, 512)] * 60, batch_size=None)  # type: ignore[arg-type]
    module = Validated()

    def run() -> float:
        started = time.perf_counter()
        trainer.validate(module, loader, verbose=False)
        return time.perf_counter() - started

    return run


def main() -> None:
    start("Validation with MetricComparison against AMP pass + fp32 pass")
    compared, amp, fp32 = validation("bf16", [MetricComparison()]), validation("bf16", []), validation("fp32", [])
    with_it: list[float] = []
    passes: list[float] = []
    for i in range(13):
        sides = (compared(), amp() + fp32())
        if i >= 2:
            with_it.append(sides[0])
            passes.append(sides[1])
    report("bf16, 8 blocks of width 512, 60 batches", with_it, passes, target=">= 0.91 (at most 1.1 of both passes)")


if __name__ == "__main__":
    main()
