"""What follows from what was measured: findings, each with its number and the next thing to do. Plain data."""

from lightning_amp.advice._findings import Finding
from lightning_amp.advice._gains import (
    AS_IT_IS,
    CHANNELS_LAST,
    FUSED,
    IN_FP32,
    LARGER_BATCH,
    TIMES_LARGER,
    WITHOUT_RULES,
)
from lightning_amp.advice._machine_facts import Format, Machine, Product, Trap
from lightning_amp.advice._report import DoctorReport
from lightning_amp.advice._step_facts import (
    CastSite,
    Loading,
    Memory,
    OptimizerFacts,
    Reason,
    SlowProduct,
    Step,
    Unaligned,
    Variant,
    Wait,
)
from lightning_amp.advice._words import SIGNS, details, summary, title

__all__ = [
    "AS_IT_IS",
    "CHANNELS_LAST",
    "FUSED",
    "IN_FP32",
    "LARGER_BATCH",
    "SIGNS",
    "TIMES_LARGER",
    "WITHOUT_RULES",
    "CastSite",
    "DoctorReport",
    "Finding",
    "Format",
    "Loading",
    "Machine",
    "Memory",
    "OptimizerFacts",
    "Product",
    "Reason",
    "SlowProduct",
    "Step",
    "Trap",
    "Unaligned",
    "Variant",
    "Wait",
    "details",
    "summary",
    "title",
]
