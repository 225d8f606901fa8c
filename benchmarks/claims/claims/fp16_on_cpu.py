"""Whether fp16 is slow on a CPU."""

from __future__ import annotations

import torch

from benchmarks.claims._claim import Claim, Outcome, Setting
from benchmarks.claims._models import gpt
from benchmarks.claims._sources import AMP_DOCS
from benchmarks.claims._speed import at_least, compared, step, written


def run(setting: Setting) -> Outcome:
    """Time steps of a GPT on the CPU, wherever the other claims run."""
    here = setting._replace(device_type="cpu")
    example = gpt(here.device, batch=8, length=32)
    speed = compared(here, step(example, torch.bfloat16), step(example, torch.float16))
    against_fp32 = compared(here, step(example, torch.bfloat16), step(example, None))
    where = " on its CPU" if setting.device_type == "cuda" else ""
    return Outcome(at_least(speed, 1.05), written(speed) + where, f"bf16 against fp32: {written(against_fp32)}.")


CLAIM = Claim(
    "On a CPU bf16 is faster than fp16",
    AMP_DOCS,
    "Steps of the small GPT on the CPU, bf16 against fp16; threshold 1.05.",
    run,
)
