"""Choose the precision, keep modules and metrics in fp32, cast weights once, multiply in fp8. No Lightning.

Read `_precision_choice.py` first.
"""

from lightning_amp.casting._float8 import (
    checked_recipe,
    choose_fp8_layers,
    emulates,
    fp8_summary,
    linears_in_fp8,
    may_run_in_fp8,
    nothing_qualifies,
)
from lightning_amp.casting._fp32_metrics import is_metric, metrics_in_fp32
from lightning_amp.casting._fp32_modules import Fp32Modules, Rule, modules_matching
from lightning_amp.casting._fp32_region import EpochEnd, Fp32Outputs, fp32_region
from lightning_amp.casting._method_override import MethodOverride, Overrides
from lightning_amp.casting._precision_choice import (
    Canonical,
    Choice,
    Precision,
    cpu_has,
    has_bf16_units,
    our_name,
    parse_precision,
    runnable,
)
from lightning_amp.casting._reused_weights import ReusedWeights

__all__ = [
    "Canonical",
    "Choice",
    "EpochEnd",
    "Fp32Modules",
    "Fp32Outputs",
    "MethodOverride",
    "Overrides",
    "Precision",
    "ReusedWeights",
    "Rule",
    "checked_recipe",
    "choose_fp8_layers",
    "cpu_has",
    "emulates",
    "fp8_summary",
    "fp32_region",
    "has_bf16_units",
    "is_metric",
    "linears_in_fp8",
    "may_run_in_fp8",
    "metrics_in_fp32",
    "modules_matching",
    "nothing_qualifies",
    "our_name",
    "parse_precision",
    "runnable",
]
