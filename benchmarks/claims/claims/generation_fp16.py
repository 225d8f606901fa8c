"""Whether fp16 removes most of the mismatch between training and generation."""

from __future__ import annotations

import math

import torch

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._sources import QI
from benchmarks.claims.claims._cached import mismatch


def run(setting: Setting) -> Outcome:
    """Compare the KL divergence in bf16 with that in fp16, as a geometric mean over the seeds."""
    pairs = [
        (mismatch(setting, torch.bfloat16, seed), mismatch(setting, torch.float16, seed)) for seed in setting.seeds
    ]
    logs = Interval.of(math.log(bf16.divergence / fp16.divergence) for bf16, fp16 in pairs)
    factor = Interval(*map(math.exp, logs))
    largest = sum(bf16.largest for bf16, _ in pairs) / sum(fp16.largest for _, fp16 in pairs)
    details = f"Largest difference: {largest:.1f} times smaller."
    return Outcome(factor.within(10.0, math.inf), f"KL {factor.text('.2g')} times smaller", details)


CLAIM = Claim(
    "fp16 generation differs ten times less",
    QI,
    "The same runs: KL in bf16 over KL in fp16; at least 10.",
    run,
)
