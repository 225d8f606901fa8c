"""Whether the first steps are skipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.claims._claim import Claim, Interval, Outcome, Setting, overall
from benchmarks.claims._models import GPT, text_loss
from benchmarks.claims._sources import AMP_DOCS
from benchmarks.claims._training import Task, batches, fit, seeded
from lightning_amp import AmpPrecision


def run(setting: Setting) -> Outcome:
    """Count the skips of the default scaler, with the mean of the losses and with their sum."""
    mean = Interval.of(_skips(setting, seed, summed=False) for seed in setting.seeds)
    total = Interval.of(_skips(setting, seed, summed=True) for seed in setting.seeds)
    figure = f"mean loss {mean.text('.2g')}, summed loss {total.text('.2g')}"
    return Outcome(overall([mean.within(1, 20), total.within(1, 20)]), figure)


def _skips(setting: Setting, seed: int, *, summed: bool) -> int:
    def loss(net: nn.Module, tokens: Tensor) -> Tensor:
        return text_loss(net, tokens) * (tokens[:, 1:].numel() if summed else 1)

    plugin = AmpPrecision("fp16")
    torch.manual_seed(seed)
    fit(Task(seeded(seed, GPT), loss), batches(20, seed), setting, plugins=[plugin])
    return plugin.num_skipped


CLAIM = Claim(
    "fp16 skips the first steps",
    AMP_DOCS,
    "Skips in a GPT's first 20 steps from scale 65,536; 1 or more.",
    run,
)
