"""Whether generation gives other log-probabilities than training."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._sources import QI
from benchmarks.claims.claims._cached import mismatch


def run(setting: Setting) -> Outcome:
    """Compare the largest difference in bf16 with that in fp32."""
    found = {
        name: [mismatch(setting, dtype, seed) for seed in setting.seeds]
        for name, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.items()
    }
    largest = {name: Interval.of(value.largest for value in values) for name, values in found.items()}
    divergence = {name: Interval.of(value.divergence for value in values).mean for name, values in found.items()}
    details = "KL: " + ", ".join(f"{name} {value:.1g}" for name, value in divergence.items()) + "."
    figure = ", ".join(f"{name} {interval.mean:.2g}" for name, interval in largest.items())
    return Outcome(largest["bf16"].within(0.01, 1e9), figure, details)


CLAIM = Claim(
    "Generation gives other log-probabilities than training",
    QI,
    "A trained GPT, all tokens at once against one by one with a cache: the largest difference exceeds 0.01 in bf16.",
    run,
)
