"""Plain records of what was seen in a run, and of what was tried on it; who prints them is `reports`."""

from lightning_amp.findings._remedy import Remedy, RemedyKind
from lightning_amp.findings._step import (
    StepPrecision,
    StepReason,
    StepRecord,
    before_fallback,
    describe_fallbacks,
    fallbacks,
)

__all__ = [
    "Remedy",
    "RemedyKind",
    "StepPrecision",
    "StepReason",
    "StepRecord",
    "before_fallback",
    "describe_fallbacks",
    "fallbacks",
]
