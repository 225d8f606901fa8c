"""Plain records of what was seen and tried."""

from lightning_amp.findings._step import (
    StepPrecision,
    StepReason,
    StepRecord,
    before_fallback,
    describe_fallbacks,
    fallbacks,
)

__all__ = [
    "StepPrecision",
    "StepReason",
    "StepRecord",
    "before_fallback",
    "describe_fallbacks",
    "fallbacks",
]
