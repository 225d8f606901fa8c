"""Whether small models become slower."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting
from benchmarks.claims._models import small_mlp
from benchmarks.claims._sources import AMP_RECIPE
from benchmarks.claims._speed import compared, step, written
from benchmarks.claims.claims.faster import of_large_gpt


def run(setting: Setting) -> Outcome:
    """Time steps of a small MLP in bf16 and in fp32."""
    example = small_mlp(setting.device)
    half, full = step(example, torch.bfloat16), step(example, None)
    speed = compared(setting, lambda: [half() for _ in range(20)], lambda: [full() for _ in range(20)])
    large = of_large_gpt(setting)
    if large.claim == "slower":  # then small size cannot be the reason
        return Outcome("needs a GPU", f"{written(speed)}, but a large GPT {written(large)} on this CPU")
    verdict = {"slower": "reproduced", "faster": "not reproduced", "same": "not reproduced"}
    return Outcome(verdict.get(speed.claim, "undecided"), written(speed))  # pyright: ignore[reportArgumentType]


CLAIM = Claim(
    "Small models become slower",
    AMP_RECIPE,
    "Steps of an MLP of 5,000 parameters, bf16 against fp32, where a larger GPT is not slower.",
    run,
)
