"""Whether gradients become zero in bf16."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting
from benchmarks.claims._models import text, text_loss
from benchmarks.claims._sources import KALAMKAR
from benchmarks.claims._training import trained


def run(setting: Setting) -> Outcome:
    """Round the fp32 gradients of trained GPTs to bf16 and fp16."""
    shares = [_shares(setting, seed) for seed in setting.seeds]
    bf16, fp16 = (Interval.of(share[k] for share in shares) for k in range(2))
    figure = f"bf16 {bf16.mean:.2g}, fp16 {100 * fp16.mean:.2g} %"
    return Outcome(bf16.within(0.0, 1e-6), figure)


def _shares(setting: Setting, seed: int) -> tuple[float, float]:
    net = trained(setting, "fp32", seed).net
    net.zero_grad()
    text_loss(net, text(16, 33, seed).to(setting.device)).backward()
    gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    gradients = gradients[gradients != 0]
    bf16, fp16 = (float((gradients.to(dtype) == 0).float().mean()) for dtype in (torch.bfloat16, torch.float16))
    return bf16, fp16


CLAIM = Claim(
    "No gradient vanishes in bf16",
    KALAMKAR,
    "Share of a trained GPT's non-zero gradients that round to zero; at most 1e-6.",
    run,
)
