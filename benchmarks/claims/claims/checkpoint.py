"""Whether checkpoints become half as large."""

from __future__ import annotations

import io

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting, decided
from benchmarks.claims._training import trained


def run(setting: Setting) -> Outcome:
    """Save the weights after training in bf16 and in fp32."""
    sizes: dict[str, int] = {}
    for how in ("fp32", "bf16"):
        file = io.BytesIO()
        torch.save(trained(setting, how, 0).net.state_dict(), file)
        sizes[how] = len(file.getvalue())
    ratio = sizes["bf16"] / sizes["fp32"]
    return Outcome(decided(ratio <= 0.55), f"{ratio:.2f}x: the weights stay in fp32")


CLAIM = Claim(
    "The saved model is half as large",
    "Popular articles",
    "Bytes of a GPT's saved weights after training, bf16 over fp32; threshold 0.55.",
    run,
)
