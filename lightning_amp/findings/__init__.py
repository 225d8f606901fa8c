"""Plain records of observations in a run, and of remedies that were tried. `reports` prints them.

Read `_step.py` first.
"""

from lightning_amp.findings._gradient import (
    LOW_DB,
    TOTAL,
    GradientFault,
    GradientFaultKind,
    GradientRow,
    InaccurateDerivative,
)
from lightning_amp.findings._metric import LOADER_SUFFIX, ComparisonRow, EvaluationReport, ModuleRow
from lightning_amp.findings._op import Op, OpKind
from lightning_amp.findings._remedy import TriedRemedy
from lightning_amp.findings._step import StepPrecision, StepReason, StepRecord

__all__ = [
    "LOADER_SUFFIX",
    "LOW_DB",
    "TOTAL",
    "ComparisonRow",
    "EvaluationReport",
    "GradientFault",
    "GradientFaultKind",
    "GradientRow",
    "InaccurateDerivative",
    "ModuleRow",
    "Op",
    "OpKind",
    "StepPrecision",
    "StepReason",
    "StepRecord",
    "TriedRemedy",
]
