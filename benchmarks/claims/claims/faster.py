"""Whether mixed precision is faster."""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting
from benchmarks.claims._models import large_gpt
from benchmarks.claims._sources import AMP_RECIPE
from benchmarks.claims._speed import at_least, compared, step, written
from lightning_amp.casting import cpu_has
from lightning_amp.measure import SpeedComparison


@cache
def of_large_gpt(setting: Setting) -> SpeedComparison:
    """Time steps of a GPT in bf16 and in strict fp32."""
    example = large_gpt(setting.device, tiny=setting.tiny)
    torch.set_float32_matmul_precision("highest")
    return compared(setting, step(example, torch.bfloat16), step(example, None))


def run(setting: Setting) -> Outcome:
    """Judge the speed; a CPU cannot."""
    speed = of_large_gpt(setting)
    if setting.device_type == "cpu":
        units = " and ".join(cpu_has("bf16")) or "no bf16 instructions"
        return Outcome("needs a GPU", f"{written(speed)} on this CPU", f"This CPU has {units}.")
    return Outcome(at_least(speed, 1.3), written(speed))


CLAIM = Claim(
    "bf16 trains 1.3 times as fast on a GPU",
    AMP_RECIPE,
    "Steps of the larger GPT in bf16 against strict fp32.",
    run,
)
