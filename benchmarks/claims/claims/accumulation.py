"""Whether products must be summed in fp32."""

from __future__ import annotations

import math

import torch

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._sources import MICIKEVICIUS


def run(setting: Setting) -> Outcome:
    """Compare the errors of dot products, summed in fp16 and in fp32."""
    pairs = [_errors(seed) for seed in setting.seeds]
    logs = Interval.of(math.log(fp16 / fp32) for fp16, fp32 in pairs)
    factor = Interval(*map(math.exp, logs))
    return Outcome(factor.within(2.0, math.inf), f"{factor.text('.2g')} times the error")


def _errors(seed: int) -> tuple[float, float]:
    """Return the root mean square errors of 256 products of 4096 terms, both rounded to fp16 at the end."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(256, 4096, generator=generator).half() for _ in range(2))
    exact = (a.double() * b.double()).sum(1)
    total = torch.zeros(256, dtype=torch.float16)
    for x, y in zip(a.T, b.T, strict=True):
        total = (total.float() + x.float() * y.float()).half()
    in_fp32 = (a.float() * b.float()).sum(1).half()
    fp16, fp32 = (float((found.double() - exact).square().mean().sqrt()) for found in (total, in_fp32))
    return fp16, fp32


CLAIM = Claim(
    "Products must be summed in fp32",
    MICIKEVICIUS,
    "Emulated fp16 dot products of 4,096 terms: the error of fp16 sums over that of fp32 sums; at least 2.",
    run,
)
