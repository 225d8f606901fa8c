"""Whether stochastic rounding cures lost updates."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._sources import GUPTA


def run(setting: Setting) -> Outcome:
    """Add 0.001 a thousand times to bf16 weights of 1.0, rounded up or down at random."""
    means: list[float] = []
    spreads: list[float] = []
    for seed in setting.seeds:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.ones(4096, dtype=torch.bfloat16)
        for _ in range(1000):
            weights = _rounded(weights.float() + 0.001, generator)
        means.append(float(weights.float().mean()))
        spreads.append(float(weights.float().std()))
    found = Interval.of(means)
    details = f"Their standard deviation: {sum(spreads) / len(spreads):.2g}."
    return Outcome(found.within(1.98, 2.02), found.text(".4f"), details)


def _rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round to bf16 with probabilities that make the mean exact: add random bits below, then truncate."""
    bits = values.view(torch.int32) + torch.randint(1 << 16, values.shape, generator=generator, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


CLAIM = Claim(
    "Stochastic rounding saves small updates",
    GUPTA,
    "The same sum in 4,096 bf16 weights: their mean is within 1 % of 2.",
    run,
)
