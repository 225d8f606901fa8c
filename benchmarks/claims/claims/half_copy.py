"""Whether weights take one and a half times their bytes."""

from __future__ import annotations

import torch

from benchmarks.claims._bytes import saved
from benchmarks.claims._claim import Claim, Outcome, Setting, decided, overall
from benchmarks.claims._models import examples
from benchmarks.claims._sources import TRANSFORMERS
from lightning_amp.measure import num_bytes


def run(setting: Setting) -> Outcome:
    """Add the half-precision copies that autocast keeps until the backward to the weights."""
    ratios: dict[str, float] = {}
    for name, example in examples(setting.device).items():
        weights = num_bytes(example.net.parameters())
        ratios[name] = 1 + saved(example, torch.bfloat16).copies / weights
    figure = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    return Outcome(overall(decided(1.4 <= ratio <= 1.6) for ratio in ratios.values()), figure)


CLAIM = Claim(
    "Weights take 1.5 times their fp32 bytes",
    TRANSFORMERS,
    "Weights and the bf16 copies kept for the backward, over weights; 1.4 to 1.6.",
    run,
)
