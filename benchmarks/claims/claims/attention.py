"""Whether rounding in attention is biased, and a shift of the maximum removes the bias."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, both
from benchmarks.claims._sources import QIU


def run(setting: Setting) -> Outcome:
    """Emulate the product of probabilities and values: bf16 factors, summed in fp32, rounded to bf16."""
    tied = Interval.of(_bias(seed, shifted=False) for seed in setting.seeds)
    shifted = Interval.of(_bias(seed, shifted=True) for seed in setting.seeds)
    random = Interval.of(_bias(seed, shifted=False, same_sign=False) for seed in setting.seeds)
    verdict = both([tied.within(-1.0, -0.1), shifted.within(-0.1, 0.1)])
    details = f"Shifted maximum: {shifted.text('+.2f')}. Values of both signs: {random.text('+.2f')}."
    return Outcome(verdict, tied.text("+.2f"), details)


def _bias(seed: int, *, shifted: bool, same_sign: bool = True) -> float:
    """Return the mean error over the mean absolute error of rows whose maximum occurs twice."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(256, 64, generator=generator) - 8
    largest = 1 + 3 * torch.rand(256, 1, generator=generator)
    places = torch.rand(256, 64, generator=generator).topk(2).indices
    scores.scatter_(1, places, largest.expand(-1, 2))
    values = torch.randn(64, 64, generator=generator)
    values = (-1 - values.abs() if same_sign else values).bfloat16()
    weights = (scores - (2 * largest if shifted else largest)).exp()
    exact = weights.double() @ values.double()
    rounded = (weights.bfloat16().float() @ values.float()).bfloat16()
    error = (rounded.double() - exact) / weights.double().sum(1, keepdim=True)
    return float(error.mean() / error.abs().mean())


CLAIM = Claim(
    "Rounding in bf16 attention is biased",
    QIU,
    "Emulated rows with two equal maxima and negative values: mean error over mean absolute error;"
    " below -0.1, and within 0.1 of 0 with a shifted maximum.",
    run,
)
