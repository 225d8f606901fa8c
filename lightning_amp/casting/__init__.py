"""Choose the precision, keep modules and metrics in fp32, cast weights once, multiply in fp8. No Lightning.

Read `_precision_choice.py` first.
"""

from lightning_amp.casting._cpu_speed import ProbeKind, cpu_speed
from lightning_amp.casting._float8 import (
    Float8Linears,
    choose_fp8_layers,
    linear_layers,
    may_run_in_fp8,
    nothing_qualifies,
    num_converted,
    share_of_flops,
)
from lightning_amp.casting._float8_recipes import checked_recipe, emulates, name_of, needs_whole_tiles
from lightning_amp.casting._fp32_metrics import Fp32Metrics, fp32_region, is_metric
from lightning_amp.casting._fp32_modules import Fp32Modules, Rule, checked_module_rules, modules_matching
from lightning_amp.casting._fp32_outputs import EpochEnd, Fp32Outputs
from lightning_amp.casting._matmul_flops import MatmulFlops, flop_formulas, multiplied_dtype
from lightning_amp.casting._method_override import MethodOverride
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
from lightning_amp.casting._reused_weights import ReusedWeights, SharedCopies

__all__ = [
    "Canonical",
    "Choice",
    "EpochEnd",
    "Float8Linears",
    "Fp32Metrics",
    "Fp32Modules",
    "Fp32Outputs",
    "MatmulFlops",
    "MethodOverride",
    "Precision",
    "ProbeKind",
    "ReusedWeights",
    "Rule",
    "SharedCopies",
    "checked_module_rules",
    "checked_recipe",
    "choose_fp8_layers",
    "cpu_has",
    "cpu_speed",
    "emulates",
    "flop_formulas",
    "fp32_region",
    "has_bf16_units",
    "is_metric",
    "linear_layers",
    "may_run_in_fp8",
    "modules_matching",
    "multiplied_dtype",
    "name_of",
    "needs_whole_tiles",
    "nothing_qualifies",
    "num_converted",
    "our_name",
    "parse_precision",
    "runnable",
    "share_of_flops",
]
