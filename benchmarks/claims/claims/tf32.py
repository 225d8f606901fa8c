"""Whether TF32 gives a part of the speed without any change of code."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting
from benchmarks.claims._models import large_gpt
from benchmarks.claims._sources import NVIDIA
from benchmarks.claims._speed import at_least, compared, step, written


def run(setting: Setting) -> Outcome:
    """Time fp32 steps of a GPT with and without TF32; only GPUs have it."""
    if setting.device_type == "cpu":
        return Outcome("needs a GPU", "CPUs have no TF32")
    train = step(large_gpt(setting.device, tiny=setting.tiny), None)

    def with_matmul(precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        train()

    try:
        speed = compared(setting, lambda: with_matmul("high"), lambda: with_matmul("highest"))
    finally:
        torch.set_float32_matmul_precision("highest")
    return Outcome(at_least(speed, 1.3), written(speed))


CLAIM = Claim(
    "TF32 trains 1.3 times as fast",
    NVIDIA,
    "fp32 steps of a GPT with and without TF32.",
    run,
)
