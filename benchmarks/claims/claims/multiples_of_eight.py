"""Whether sizes that are multiples of eight are faster."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting
from benchmarks.claims._sources import NVIDIA
from benchmarks.claims._speed import at_least, compared, written


def run(setting: Setting) -> Outcome:
    """Time a product of matrices whose sizes are multiples of eight against one with a little less work."""
    size = 64 if setting.tiny else 4096 if setting.device_type == "cuda" else 384
    even, odd = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for n in (size, size - 1))
    speed = compared(setting, lambda: even @ even, lambda: odd @ odd)
    if setting.device_type == "cpu":
        return Outcome("needs a GPU", f"{written(speed)} on this CPU")
    return Outcome(at_least(speed, 1.05), written(speed))


CLAIM = Claim(
    "Multiples of eight are faster",
    NVIDIA,
    "bf16 products of 384 x 384 (GPU: 4096) against 383 (4095); threshold 1.05.",
    run,
)
