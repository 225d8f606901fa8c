"""Whether gradients that are clipped before unscaling give wrong updates."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._models import GPT, text, text_loss
from benchmarks.claims._sources import AMP_EXAMPLES
from benchmarks.claims._training import seeded

_SCALE, _LIMIT = 2.0**12, 0.5


def run(setting: Setting) -> Outcome:
    """Compare the norms that reach the optimizer in both orders."""
    norms = [(_norm(setting, seed, first=True), _norm(setting, seed, first=False)) for seed in setting.seeds]
    ratio = Interval.of(before / after for before, after in norms)
    return Outcome(ratio.within(0.0, 0.01), f"updates {1 / ratio.mean:,.0f} times too small")


def _norm(setting: Setting, seed: int, *, first: bool) -> float:
    """Return the norm of the gradient that the optimizer gets, clipped first or unscaled first."""
    net = seeded(seed, GPT).to(setting.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(setting.device_type, init_scale=_SCALE)
    with torch.autocast(setting.device_type, torch.float16):
        loss = text_loss(net, text(4, 17, seed).to(setting.device))
    scaler.scale(loss).backward()
    if first:
        torch.nn.utils.clip_grad_norm_(net.parameters(), _LIMIT)
    scaler.unscale_(optimizer)
    if not first:
        torch.nn.utils.clip_grad_norm_(net.parameters(), _LIMIT)
    return float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))


CLAIM = Claim(
    "Clipping before unscaling is wrong",
    AMP_EXAMPLES,
    "fp16 GPT, scale 4096: the clipped norm in both orders; ratio below 0.01.",
    run,
)
