"""Whether activations take half the bytes, and how large their share is."""

from __future__ import annotations

import torch

from benchmarks.claims._bytes import saved
from benchmarks.claims._claim import Claim, Outcome, Setting, decided, overall
from benchmarks.claims._models import examples
from benchmarks.claims._sources import MICIKEVICIUS
from lightning_amp.measure import num_bytes


def run(setting: Setting) -> Outcome:
    """Count what the forward keeps for the backward; weights, gradients and AdamW take four times the weights."""
    ratios: dict[str, float] = {}
    shares: dict[str, float] = {}
    for name, example in examples(setting.device).items():
        fp32, bf16 = saved(example, None).activations, saved(example, torch.bfloat16).activations
        ratios[name] = bf16 / fp32
        shares[name] = fp32 / (fp32 + 4 * num_bytes(example.net.parameters()))
    figure = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    share = ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in shares.items())
    verdict = overall(decided(ratio <= 0.55) for ratio in ratios.values())
    return Outcome(verdict, figure, f"Their share of fp32 training: {share}.")


CLAIM = Claim(
    "Activations take half the bytes",
    MICIKEVICIUS,
    "Bytes kept for the backward, bf16 over fp32, without copies of weights; threshold 0.55.",
    run,
)
