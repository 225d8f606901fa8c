"""Plain records of observations in a run, and of remedies that were tried. `reports` prints them.

Read `_step.py` first.
"""

from lightning_amp.findings._gradient import LOST_DB, TOTAL, GradientRow, GradientSample
from lightning_amp.findings._lost_precision import (
    WRONG_DB,
    LostPrecision,
    ModuleSums,
    TriedRemedy,
    bits_kept,
    describe_tried,
    worst_db,
)
from lightning_amp.findings._metric import ComparisonRow, ModuleRow
from lightning_amp.findings._op import Op, OpKind
from lightning_amp.findings._step import StepPrecision, StepReason, StepRecord

__all__ = [
    "LOST_DB",
    "TOTAL",
    "WRONG_DB",
    "ComparisonRow",
    "GradientRow",
    "GradientSample",
    "LostPrecision",
    "ModuleRow",
    "ModuleSums",
    "Op",
    "OpKind",
    "StepPrecision",
    "StepReason",
    "StepRecord",
    "TriedRemedy",
    "bits_kept",
    "describe_tried",
    "worst_db",
]
