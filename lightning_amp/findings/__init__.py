"""Plain records of what was seen in a run, and of what was tried on it; who prints them is `reports`.

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
from lightning_amp.findings._overflow import Diagnosis, DiagnosisCause, Operation, Where
from lightning_amp.findings._remedy import Remedy, RemedyKind
from lightning_amp.findings._step import (
    StepPrecision,
    StepReason,
    StepRecord,
    before_fallback,
    describe_fallbacks,
    fallbacks,
)
from lightning_amp.findings._tried_remedy import TriedRemedy

__all__ = [
    "LOADER_SUFFIX",
    "LOW_DB",
    "TOTAL",
    "ComparisonRow",
    "Diagnosis",
    "DiagnosisCause",
    "EvaluationReport",
    "GradientFault",
    "GradientFaultKind",
    "GradientRow",
    "InaccurateDerivative",
    "ModuleRow",
    "Operation",
    "Remedy",
    "RemedyKind",
    "StepPrecision",
    "StepReason",
    "StepRecord",
    "TriedRemedy",
    "Where",
    "before_fallback",
    "describe_fallbacks",
    "fallbacks",
]
