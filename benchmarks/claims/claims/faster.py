"""Whether mixed precision is faster."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting
from benchmarks.claims._models import large_gpt
from benchmarks.claims._sources import AMP_RECIPE
from benchmarks.claims._speed import at_least, compared, step, written


def run(setting: Setting) -> Outcome:
    """Time steps of a GPT in bf16 and in strict fp32."""
    example = large_gpt(setting.device, tiny=setting.tiny)
    torch.set_float32_matmul_precision("highest")
    speed = compared(setting, step(example, torch.bfloat16), step(example, None))
    if setting.device_type == "cpu":
        return Outcome("needs a GPU", f"{written(speed)} on this CPU")
    return Outcome(at_least(speed, 1.3), written(speed))


CLAIM = Claim(
    "Training is at least 1.3 times as fast on a GPU",
    AMP_RECIPE,
    "Steps of a GPT in bf16 against strict fp32.",
    run,
)
