"""What code computes in: the precision, modules and metrics in fp32, weights that are cast once. Plain torch."""

from lightning_amp.casting._choice import Canonical, Choice, Precision, cpu_has_bf16, parse_precision
from lightning_amp.casting._fp32_metrics import MetricGuards
from lightning_amp.casting._fp32_modules import Islands, Rule, checked_rules
from lightning_amp.casting._fp32_outputs import EpochEnd, Fp32Outputs
from lightning_amp.casting._method_override import Override
from lightning_amp.casting._reused_weights import ReusedWeights

__all__ = [
    "Canonical",
    "Choice",
    "EpochEnd",
    "Fp32Outputs",
    "Islands",
    "MetricGuards",
    "Override",
    "Precision",
    "ReusedWeights",
    "Rule",
    "checked_rules",
    "cpu_has_bf16",
    "parse_precision",
]
