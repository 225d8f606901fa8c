"""Time one report of `OverflowLocator`, in steps of a module whose step is hundreds of small operations.

`python -m tests.benchmarks.explanation [blocks]`; the target is at most 25 steps. There are three faults: a weight of
the last block makes its output overflow in fp16; an operation in the step is infinite in each precision; a gradient
alone is.
"""

from __future__ import annotations

import cProfile
import logging
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_amp import AmpPrecision, OverflowLocator

STEPS, BAD = 8, 5
WANTED = 25


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.linear(x)


class Deep(L.LightningModule):
    """A module of small blocks, with a fault in one of its batches."""

    def __init__(self, blocks: int, fault: str, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.fault, self.bad = fault, False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.bad = batch_idx == BAD
        out = self.blocks(batch).float()
        loss = out.pow(2).mean()
        if self.bad and self.fault == "forward":
            loss = loss + (out * 0).sum().log()
        elif self.bad and self.fault == "half":
            loss = loss + (out.half() * 3e4 * 3e4).float().mean() * 1e-9
        elif self.bad and self.fault == "backward":
            loss = loss + (out - out.detach()).abs().sum().sqrt()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(L.Callback):
    """Record the time of each batch; stands before and after the locator in the list of callbacks."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.process_time() - self._start)


def explanation(blocks: int, fault: str, precision: str) -> tuple[float, float, OverflowLocator]:
    """Return the seconds of a plain step and of a report."""
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(STEPS * 4, 8), batch_size=4)
    plain: list[float] = []
    whole: list[float] = []
    locator = OverflowLocator()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[AmpPrecision(precision)],
        callbacks=[Clock(plain), locator, Clock(whole)],
    )  # fmt: skip
    trainer.fit(Deep(blocks, fault), data)
    step = statistics.median(t for i, t in enumerate(plain) if i not in (0, BAD))
    return step, whole[BAD] - plain[BAD], locator


def profiled(function: Callable[[], Any]) -> None:
    profile = cProfile.Profile()
    profile.runcall(function)
    pstats.Stats(profile).sort_stats("tottime").print_stats(35)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # process time, so that other work on the machine does not count
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_amp").setLevel(logging.ERROR)
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    if "profile" in sys.argv:
        profiled(lambda: explanation(blocks, sys.argv[3], sys.argv[4]))
        return
    for fault in ("forward", "half", "backward"):
        for precision in ("fp16", "bf16"):
            step, report, locator = explanation(blocks, fault, precision)
            tried = [len(report.remedies) for report in locator.reports if report.batch_idx == BAD]
            print(
                f"{blocks} blocks, {fault}, {precision}: a step {step * 1e3:.0f} ms, a report {report:.2f} s, that is"
                f" {report / step:.0f} steps ({tried} remedies tried); at most {WANTED} wanted",
                flush=True,
            )


if __name__ == "__main__":
    main()
