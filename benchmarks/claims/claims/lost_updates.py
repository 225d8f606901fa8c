"""How many updates of weights are too small for half-precision weights."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, both
from benchmarks.claims._models import GPT, text, text_loss
from benchmarks.claims._sources import MICIKEVICIUS
from benchmarks.claims._training import seeded

_WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run(setting: Setting) -> Outcome:
    """Count the updates of AdamW that would leave a rounded weight unchanged."""
    shares = [_shares(setting, seed) for seed in setting.seeds]
    found = {name: Interval.of(share[name] for share in shares) for name in _WEIGHTS}
    figure = ", ".join(f"{name} {interval.text('.2g', 100, ' %')}" for name, interval in found.items())
    return Outcome(both(interval.within(0.05, 1.0) for interval in found.values()), figure)


def _shares(setting: Setting, seed: int) -> dict[str, float]:
    net = seeded(seed, GPT).to(setting.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    before: list[torch.Tensor] = []
    for tokens in text(16 * 10, 33, seed).split(16):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.zero_grad()
        text_loss(net, tokens.to(setting.device)).backward()
        optimizer.step()
    old, new = (torch.cat([v.detach().flatten() for v in values]) for values in (before, net.parameters()))
    moved = old != new
    update = (new - old)[moved]
    rounded = {name: old[moved].to(dtype) for name, dtype in _WEIGHTS.items()}
    return {
        name: float(((weight.float() + update).to(weight.dtype) == weight).float().mean())
        for name, weight in rounded.items()
    }


CLAIM = Claim(
    "Half-precision weights lose 5 % of updates",
    MICIKEVICIUS,
    "Updates of a GPT's tenth AdamW step, learning rate 0.0001, that change no rounded weight.",
    run,
)
