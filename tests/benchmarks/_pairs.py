"""Time two sides, interleaved in one process, so that a shared and noisy machine slows both alike.

Each side is a whole `trainer.fit` in its own thread. The threads take turns of one block of steps each. The reported
ratio is the median over pairs of blocks.
"""

from __future__ import annotations

import logging
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from lightning_amp.advice._machine import device_name


class Turns(L.Callback):
    """Time blocks of steps of one fit, and hand over to the other side after each block."""

    def __init__(self, steps: int, blocks: int, warmup: int) -> None:
        self.steps, self.blocks, self.warmup = steps, blocks, warmup
        self.go, self.done = threading.Event(), threading.Event()
        self.times: list[float] = []
        self.seen = 0
        self.failure: BaseException | None = None

    @classmethod
    def alone(cls, steps: int) -> Turns:
        """Run steps with nothing beside them, to warm up."""
        turns = cls(1, steps, 0)
        turns.wait = lambda: None  # type: ignore[method-assign]
        return turns

    @property
    def total(self) -> int:
        return self.warmup + self.steps * self.blocks

    def wait(self) -> None:
        self.done.set()
        self.go.wait()
        self.go.clear()

    def take(self) -> None:
        """Let this side run one block."""
        self.done.clear()
        self.go.set()
        self.done.wait()
        if self.failure is not None:
            raise self.failure

    def on_train_batch_start(self, *args: Any) -> None:
        if self.seen == 0:
            self.wait()
        if (self.seen - self.warmup) % self.steps == 0 and self.seen >= self.warmup:
            self.started = now()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1
        if self.seen >= self.warmup and (self.seen - self.warmup) % self.steps == 0:
            if self.seen > self.warmup:
                self.times.append((now() - self.started) / self.steps)
            self.wait()


def now() -> float:
    """Return the time at which the device has finished everything launched so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def fit(module: L.LightningModule, plugin: Any, turns: Turns, batch: torch.Tensor, **kwargs: Any) -> None:
    """Return a bare Trainer that runs `turns.total` steps on the same batch."""
    loader = torch.utils.data.DataLoader([batch] * turns.total, batch_size=None)  # type: ignore[arg-type]
    callbacks = [turns, *kwargs.pop("callbacks", [])]
    trainer = L.Trainer(
        accelerator=kwargs.pop("accelerator", "cpu"), devices=1, plugins=[plugin], max_steps=turns.total,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks, **kwargs,
    )  # fmt: skip
    trainer.fit(module, loader)


def pair(
    a: Callable[[Turns], None], b: Callable[[Turns], None], *, steps: int = 5, blocks: int = 11, warmup: int = 5
) -> tuple[list[float], list[float]]:
    """Return the seconds per step of each block of both sides."""
    sides = [Turns(steps, blocks, warmup) for _ in range(2)]

    def run(turns: Turns, target: Callable[[Turns], None]) -> None:
        try:
            target(turns)
        except BaseException as error:
            turns.failure = error
        finally:
            turns.done.set()

    threads = [threading.Thread(target=run, args=(t, f), daemon=True) for t, f in zip(sides, (a, b), strict=True)]
    for thread, turns in zip(threads, sides, strict=True):
        thread.start()
        turns.done.wait()  # the fit is built, and at its first batch
    for block in range(blocks + 1):  # the first block is the warm-up
        for turns in sides if block % 2 else reversed(sides):
            turns.take()
    for turns in sides:
        turns.go.set()
    for thread in threads:
        thread.join(30)
    return sides[0].times, sides[1].times


def time_pairs(
    a: Callable[[], Any], b: Callable[[], Any], *, pairs: int = 15, before: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Do the same for two plain functions; `before` runs before each, untimed."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs + 2):
        for side, function in ((0, a), (1, b)) if i % 2 else ((1, b), (0, a)):
            before()
            started = now()
            function()
            if i >= 2:
                times[side].append(now() - started)
    return times


def report(name: str, ours: list[float], theirs: list[float], target: str = "") -> float:
    """Print how many times as fast `ours` is: the median of the pairs, and the middle half."""
    ratios = sorted(t / o for o, t in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    median = statistics.median(ratios)
    print(
        f"{name:<58} {median:6.3f}x  [{ratios[quarter]:.3f}, {ratios[-1 - quarter]:.3f}]"
        f"   {statistics.median(ours) * 1e3:9.3f} ms against {statistics.median(theirs) * 1e3:9.3f} ms   {target}",
        flush=True,
    )
    return median


def start(title: str, device: torch.device | None = None) -> None:
    """Print which machine this is, by default the CPU, and keep Lightning quiet."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(
        f"\n{title}\n{device_name(device or torch.device('cpu'))}, Python {sys.version.split()[0]}, torch"
        f" {torch.__version__}, lightning {L.__version__}; times are per step, x is how many times as fast, with the"
        " middle half of the pairs",
        flush=True,
    )
