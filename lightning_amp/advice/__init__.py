"""What follows from what was measured: findings, each with its number and the next thing to do. Plain data."""

from lightning_amp.advice._decision import Decision
from lightning_amp.advice._findings import Finding
from lightning_amp.advice._gains import (
    AS_IT_IS,
    CHANNELS_LAST,
    FUSED,
    IN_FP32,
    LARGER_BATCH,
    TIMES_LARGER,
    WITHOUT_RULES,
    compare,
)
from lightning_amp.advice._machine_facts import Convolution, Format, Machine, Product, Support, Trap, judged
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
    "Convolution",
    "Decision",
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
    "Support",
    "Trap",
    "Unaligned",
    "Variant",
    "Wait",
    "compare",
    "details",
    "judged",
    "summary",
    "title",
]
