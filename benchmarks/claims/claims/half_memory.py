"""Whether training takes half the memory."""

from __future__ import annotations

import torch

from benchmarks.claims._bytes import peak
from benchmarks.claims._claim import Claim, Outcome, Setting, decided, overall
from benchmarks.claims._models import examples
from benchmarks.claims._sources import LIGHTNING


def run(setting: Setting) -> Outcome:
    """Compare the peaks of three models."""
    fp32 = {name: peak(example, None) for name, example in examples(setting.device).items()}
    bf16 = {name: peak(example, torch.bfloat16) for name, example in examples(setting.device).items()}
    ratios = {name: bf16[name] / fp32[name] for name in fp32}
    figure = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    return Outcome(overall(decided(ratio <= 0.55) for ratio in ratios.values()), figure)


CLAIM = Claim(
    "Training takes half the memory",
    LIGHTNING,
    "Peak of three AdamW steps, temporary buffers included, bf16 over fp32; threshold 0.55.",
    run,
)
