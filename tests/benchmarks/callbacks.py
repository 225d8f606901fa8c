"""Time the callbacks that only observe: `python -m tests.benchmarks.callbacks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from lightning_amp import AmpPrecision, DynamicLossScaler, GradientMonitor, OverflowLocator, ScaleMonitor
from tests.benchmarks._models import GPT, Timed, mlp
from tests.benchmarks._pairs import fit, pair, report, start


def plugin() -> AmpPrecision:
    return AmpPrecision("fp16", scaler=DynamicLossScaler(64.0))


def compare(name: str, net: Any, batch: torch.Tensor, callbacks: Callable[[], list[L.Callback]], **kwargs: Any) -> None:
    target = kwargs.pop("target", "")

    def side(make: Callable[[], list[L.Callback]]) -> Callable[[Any], None]:
        return lambda turns: fit(Timed(net(), fused=True), plugin(), turns, batch, callbacks=make())

    report(name, *pair(side(callbacks), side(list), **kwargs), target=target)


def main() -> None:
    start("Callbacks: with against without, fp16, fused AdamW, no skips")
    tokens, tiny = torch.randn(8, 64, 384), torch.randn(16, 32)

    def everything() -> list[L.Callback]:
        return [ScaleMonitor(), OverflowLocator(), GradientMonitor(10**9)]

    sides: list[tuple[str, Callable[[], list[L.Callback]], str]] = [
        ("ScaleMonitor", lambda: [ScaleMonitor()], ">= 0.99"),
        ("OverflowLocator", lambda: [OverflowLocator()], ">= 0.99"),
        ("GradientMonitor between its steps", lambda: [GradientMonitor(10**9)], ">= 0.99"),
        ("all observing callbacks between their sampling steps", everything, ">= 0.97"),
    ]
    for name, make, target in sides:
        compare(f"GPT 10.7 M: {name}", GPT, tokens, make, steps=3, blocks=15, warmup=6, target=target)
    for name, make, _ in sides:
        compare(f"tiny MLP: {name}", mlp, tiny, make, steps=100, blocks=21, warmup=100)

    start("What one sampled step of GradientMonitor costs, in steps of training: 1 / x")
    compare("GPT 10.7 M: GradientMonitor, every step", GPT, tokens, lambda: [GradientMonitor(1)], steps=2, blocks=5)

    start("A history of 1,000,000 steps with 1,000 skips")
    history()


def history() -> None:
    import io

    from lightning_amp.findings import StepRecord
    from lightning_amp.reports import ScaleHistory

    log = ScaleHistory()
    for i in range(1_000_000):
        skipped = i % 1000 == 999
        log.extend([StepRecord(i, 0, 1024.0, 1024.0, skipped, "loss" if skipped else "none")])
    file = io.BytesIO()
    torch.save(log.state_dict(), file)
    print(f"in the checkpoint: {len(file.getvalue()) / 1000:.0f} kB   < 200 kB")


if __name__ == "__main__":
    main()
