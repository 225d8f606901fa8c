"""Log-probabilities of the same weights in training, all tokens at once, and in generation, one by one with a cache."""

from __future__ import annotations

import copy
from functools import cache
from typing import NamedTuple

import torch
from typing_extensions import final

from benchmarks.claims._claim import Setting
from benchmarks.claims._models import Cache, text
from benchmarks.claims._training import trained

_LEAST = 1e-15
"""What float64 can tell from zero here."""


@final
class Mismatch(NamedTuple):
    """The mean KL divergence of generation from training, and the largest difference of a log-probability."""

    divergence: float
    largest: float


@cache
@torch.no_grad()
def mismatch(setting: Setting, dtype: torch.dtype, seed: int) -> Mismatch:
    """Compare both for the weights of a trained GPT, rounded to `dtype`."""
    net = copy.deepcopy(trained(setting, "fp32", seed).net).to(dtype)
    tokens = text(16, 32, seed + 100).to(setting.device)
    at_once = net(tokens).double().log_softmax(-1)
    past: Cache = {}
    steps = [net(tokens[:, place : place + 1], past, place) for place in range(tokens.shape[1])]
    one_by_one = torch.cat(steps, 1).double().log_softmax(-1)
    difference = at_once - one_by_one
    divergence = (at_once.exp() * difference).sum(-1).mean()
    return Mismatch(max(float(divergence), _LEAST), max(float(difference.abs().max()), _LEAST))
