"""Whether small updates vanish in bf16 weights."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting, decided
from benchmarks.claims._sources import ZAMIRAI


def run(setting: Setting) -> Outcome:
    """Add 0.001 a thousand times to 1.0."""
    ends: dict[str, float] = {}
    for name, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.items():
        weight = torch.ones((), dtype=dtype, device=setting.device)
        for _ in range(1000):
            weight += 0.001
        ends[name] = float(weight)
    figure = ", ".join(f"{name} {end:.3f}" for name, end in ends.items())
    return Outcome(decided(ends["bf16"] == 1.0 and abs(ends["fp32"] - 2) < 0.001), figure)


CLAIM = Claim(
    "Small updates vanish in bf16 weights",
    ZAMIRAI,
    "0.001 added a thousand times to 1.0; bf16 stays at 1, fp32 reaches 2.",
    run,
)
