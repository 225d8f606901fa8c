"""One module for each claim, in the order of the page."""

from __future__ import annotations

import importlib

from benchmarks.claims._claim import Claim

NAMES = (
    "faster", "tf32", "small_models", "multiples_of_eight", "fp16_on_cpu",
    "half_memory", "activations", "batch_twice", "half_copy", "checkpoint",
    "underflow", "bf16_underflow", "first_steps", "bf16_without_scaler", "fp16_without_scaler", "tenth_percent",
    "clipping", "bad_batch", "fp32_operations", "evaluation",
    "lost_updates", "small_updates", "stochastic_rounding", "bf16_weights",
    "generation", "generation_fp16", "attention", "accumulation", "fp8_rowwise",
)  # fmt: skip


def claims() -> dict[str, Claim]:
    """Return the claims by name."""
    return {name: importlib.import_module(f"{__name__}.{name}").CLAIM for name in NAMES}
